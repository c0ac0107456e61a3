#include "godwit/cli/support.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/base/parallel.h"
#include "godwit/cli/memory.h"
#include "godwit/io/video.h"

namespace godwit::cli {
namespace {

constexpr uintmax_t kLargestPicture = uintmax_t{64} << 20;

}  // namespace

c10::Device apply_device(const DeviceArgs& args, int64_t local_rank) {
  if (args.threads > 0) set_num_threads(args.threads);
  if (args.device == "cpu") return c10::kCPU;
  check(c10::impl::hasDeviceGuardImpl(c10::kCUDA), "--device cuda: this build of LibTorch has no CUDA");
  const auto* cuda = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  const int64_t gpus = cuda->deviceCount();
  check(gpus > 0, "--device cuda: no GPU found");
  // A launcher may have left each process one GPU to see.
  const int64_t index = gpus == 1 ? 0 : local_rank;
  check(index < gpus, "--device cuda: LOCAL_RANK is {} but this host has {} GPUs", local_rank, gpus);
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  cuda->setDevice(device);
  return device;
}

std::optional<c10::ScalarType> scalar_type_option(const std::string& dtype) {
  if (dtype.empty()) return std::nullopt;
  return dtype == "bf16" ? c10::kBFloat16 : c10::kFloat;
}

LoadedModel load(const ModelArgs& args) {
  return load_model(args.model, apply_device(args.device), scalar_type_option(args.dtype),
                    weight_format_of(args.weights));
}

SamplingParams sampling_params(const ModelArgs& args) {
  return {.temperature = args.temperature, .top_p = args.top_p, .top_k = args.top_k, .seed = args.seed};
}

EngineOptions single_sequence(const LoadedModel& model, int64_t tokens, int64_t draft_tokens) {
  return {.max_sequences = 1,
          .cache_tokens = std::min(tokens, context_limit(model.config)) + 2 * kLatentPage,
          .draft_tokens = draft_tokens,
          .memory_bytes = memory_budget(model.device)};
}

std::shared_ptr<const MediaItem> load_picture(const LoadedModel& model, const std::string& path) {
  std::error_code ec;
  const auto size = std::filesystem::file_size(path, ec);
  check(ec || size <= kLargestPicture, "{}: the picture's file is larger than {} bytes", path,
        kLargestPicture);
  return read_image(model, io::read_media_file(path), path);
}

void write_out(std::string_view text) {
  const bool ok = std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  check(ok, "stdout: {}", std::error_code(errno, std::generic_category()).message());
}

void print_json(const nlohmann::json& value) {
  write_out(value.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace) + "\n");
}

std::string human_bytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 4) bytes /= 1024, ++unit;
  return fmt::format("{:.{}f} {}", bytes, unit == 0 ? 0 : 2, units[unit]);
}

std::string human_count(double n) {
  if (n >= 1e12) return fmt::format("{:.2f} T", n / 1e12);
  return n >= 1e9 ? fmt::format("{:.2f} B", n / 1e9) : fmt::format("{:.2f} M", n / 1e6);
}

std::string read_stdin() {
  std::string text;
  char buffer[1 << 16];
  size_t got = 0;
  while ((got = std::fread(buffer, 1, sizeof(buffer), stdin)) > 0) text.append(buffer, got);
  check(std::ferror(stdin) == 0, "stdin: cannot be read");
  return text;
}

std::vector<int32_t> parse_ids(std::string_view json, int64_t vocab_size, const std::string& where) {
  const nlohmann::json list = nlohmann::json::parse(json, /*cb=*/nullptr, /*allow_exceptions=*/false);
  check(list.is_array(), "{}: expected a JSON list of token ids", where);
  std::vector<int32_t> ids;
  ids.reserve(list.size());
  for (const auto& entry : list) {
    const bool fits = entry.is_number_integer() && entry >= 0 && entry < vocab_size;
    check(fits, "{}: entry {} must be a token id from 0 to {}, got {}", where, ids.size(), vocab_size - 1,
          entry.dump());
    ids.push_back(entry.get<int32_t>());
  }
  return ids;
}

}  // namespace godwit::cli
