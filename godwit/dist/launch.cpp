#include "godwit/dist/launch.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "godwit/base/check.h"

namespace godwit::dist {
namespace {

// The first of the names that is set, as a number of [min, max].
std::optional<int64_t> number(const Environment& get, std::initializer_list<const char*> names, int64_t min,
                              int64_t max) {
  for (const char* name : names) {
    const char* text = get(name);
    if (text == nullptr || *text == '\0') continue;
    int64_t value = 0;
    const char* end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, value);
    check(error == std::errc() && stop == end && value >= min && value <= max,
          "environment: {}: expected a number from {} to {}, got \"{}\"", name, min, max, text);
    return value;
  }
  return std::nullopt;
}

}  // namespace

Launch launch_from(const Environment& get) {
  const char* address = get("MASTER_ADDR");
  const bool slurm = address != nullptr && get("WORLD_SIZE") == nullptr;
  Launch out;
  constexpr int64_t kMost = 1 << 20;
  out.size =
      (slurm ? number(get, {"SLURM_NTASKS"}, 1, kMost) : number(get, {"WORLD_SIZE"}, 1, kMost)).value_or(1);
  if (out.size == 1) return out;
  const auto rank = number(get, {"RANK", "SLURM_PROCID"}, 0, out.size - 1);
  check(rank.has_value(), "environment: WORLD_SIZE is {} but RANK is not set", out.size);
  check(address != nullptr && *address != '\0', "environment: WORLD_SIZE is {} but MASTER_ADDR is not set",
        out.size);
  const auto port = number(get, {"MASTER_PORT"}, 1, 65535);
  check(port.has_value(), "environment: WORLD_SIZE is {} but MASTER_PORT is not set", out.size);
  out.rank = *rank;
  out.local_rank = number(get, {"LOCAL_RANK", "SLURM_LOCALID"}, 0, kMost).value_or(0);
  out.host = address;
  out.port = static_cast<uint16_t>(*port);
  const char* agent = get("TORCHELASTIC_USE_AGENT_STORE");
  out.store_is_up = agent != nullptr && std::strcmp(agent, "True") == 0;
  const char* attempt = get("TORCHELASTIC_RESTART_COUNT");
  out.attempt = attempt != nullptr ? attempt : "0";
  return out;
}

Launch launch_from_environment() {
  return launch_from([](const char* name) { return std::getenv(name); });
}

}  // namespace godwit::dist
