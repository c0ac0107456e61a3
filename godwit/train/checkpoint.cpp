#include "godwit/train/checkpoint.h"

#include <ATen/ATen.h>

#include "godwit/base/check.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/jsonl.h"
#include "godwit/io/snapshot.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
constexpr const char* kState = "state.safetensors";
constexpr const char* kMeta = "checkpoint.json";

}  // namespace

void save_checkpoint(const fs::path& root, const Checkpoint& checkpoint, int64_t keep) {
  io::SnapshotWriter writer(root, checkpoint.step);
  io::NamedTensors tensors;
  for (const auto& [name, tensor] : checkpoint.tensors) {
    tensors.emplace_back(name, tensor.detach().to(at::kCPU).contiguous());
  }
  io::save_tensors(writer.directory() / kState, tensors);
  io::write_file_atomic(writer.directory() / kMeta, checkpoint.meta.dump(2) + "\n");
  writer.commit();
  if (keep > 0) io::prune_snapshots(root, keep);
}

std::optional<Checkpoint> load_newest_checkpoint(const fs::path& root) {
  const std::optional<int64_t> step = io::latest_valid_snapshot(root);
  if (!step) {
    const std::vector<int64_t> damaged = io::list_snapshots(root);
    check(damaged.empty(), "{}: no checkpoint is whole, the newest is step-{}: remove them to start anew",
          root.string(), damaged.empty() ? 0 : damaged.back());
    return std::nullopt;
  }
  const fs::path path = io::snapshot_path(root, *step);
  Checkpoint out{.step = *step, .meta = io::read_json(path / kMeta), .tensors = {}};
  for (auto& [name, tensor] : io::load_tensors(path / kState)) out.tensors.emplace(name, tensor);
  return out;
}

}  // namespace godwit
