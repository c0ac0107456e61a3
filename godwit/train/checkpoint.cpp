#include "godwit/train/checkpoint.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/checksum.h"
#include "godwit/io/jsonl.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
constexpr const char* kState = "state.safetensors";
constexpr const char* kMeta = "checkpoint.json";

std::vector<int64_t> steps_in(const fs::path& directory) {
  std::vector<int64_t> steps;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory, ignored)) {
    if (const auto step = checkpoint_step(entry.path().filename().string())) steps.push_back(*step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

fs::path path_of(const fs::path& directory, int64_t step) {
  return directory / ("step-" + std::to_string(step));
}

// Throws Error unless the directory is whole.
nlohmann::json verify(const fs::path& path) {
  nlohmann::json meta = io::read_json(path / kMeta);
  check(meta.contains("state_xxh3"), "{}: no checksum", (path / kMeta).string());
  const std::string found = io::hex64(io::xxh3_file(path / kState));
  check(meta["state_xxh3"] == found, "{}: damaged: checksum {}, expected {}", (path / kState).string(), found,
        meta["state_xxh3"].dump());
  return meta;
}

}  // namespace

std::optional<int64_t> checkpoint_step(const std::string& name) {
  constexpr std::string_view kPrefix = "step-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t step = 0;
  const char* end = name.data() + name.size();
  const auto [at, error] = std::from_chars(name.data() + kPrefix.size(), end, step);
  return error == std::errc() && at == end && step >= 0 ? std::optional(step) : std::nullopt;
}

void save_checkpoint(const fs::path& directory, const Checkpoint& checkpoint, int64_t keep) {
  io::make_directories(directory);
  const fs::path path = path_of(directory, checkpoint.step);
  io::AtomicDirectory target(path, io::AtomicDirectory::Existing::kReplace);
  io::NamedTensors tensors;
  for (const auto& [name, tensor] : checkpoint.tensors)
    tensors.emplace_back(name, tensor.detach().to(at::kCPU).contiguous());
  io::save_tensors(target.temporary() / kState, tensors);
  nlohmann::json meta = checkpoint.meta;
  meta["step"] = checkpoint.step;
  meta["state_xxh3"] = io::hex64(io::xxh3_file(target.temporary() / kState));
  io::write_file_atomic(target.temporary() / kMeta, meta.dump(2) + "\n");
  target.commit();
  verify(path);
  if (keep <= 0) return;
  const std::vector<int64_t> steps = steps_in(directory);
  for (size_t i = static_cast<size_t>(keep); i < steps.size(); ++i)
    fs::remove_all(path_of(directory, steps[i]));
}

std::optional<Checkpoint> load_newest_checkpoint(const fs::path& directory) {
  for (const int64_t step : steps_in(directory)) {
    const fs::path path = path_of(directory, step);
    try {
      Checkpoint out{.step = step, .meta = verify(path), .tensors = {}};
      for (auto& [name, tensor] : io::load_tensors(path / kState)) out.tensors.emplace(name, tensor);
      return out;
    } catch (const Error& e) {
      log_warn("checkpoint step-{} is passed over: {}", step, e.what());
    }
  }
  return std::nullopt;
}

}  // namespace godwit
