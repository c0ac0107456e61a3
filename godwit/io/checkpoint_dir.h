// A checkpoint as Hugging Face stores it: one `model.safetensors`, or shards
// `model-00001-of-000096.safetensors` and `model.safetensors.index.json` {"metadata": {"total_size": bytes},
// "weight_map": {"tensor": "shard", ...}}.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"
#include "godwit/io/safetensors.h"

namespace godwit::io {

inline constexpr std::string_view kSingleCheckpointFile = "model.safetensors";
inline constexpr std::string_view kCheckpointIndexFile = "model.safetensors.index.json";

// A shard is opened (mapped, its header read) when a tensor of it is asked for, and closed when one of
// another shard is: whatever the number of shards, one header is held, and the maps that someone still uses.
// The index of half a million names takes about 70 MB. Safe to use from several threads.
class CheckpointDir {
 public:
  // Refuses: no checkpoint, both kinds at once, an index that is damaged, names a file that is absent or
  // outside the directory, or has a tensor twice.
  explicit CheckpointDir(fs::path directory);

  const fs::path& path() const { return directory_; }
  int64_t size() const { return static_cast<int64_t>(names_.size()); }  // tensors
  const std::vector<std::string>& shard_files() const { return files_; }
  std::optional<uint64_t> declared_size() const { return total_size_; }  // the index's total_size
  // .safetensors files of the directory that are no part of the checkpoint, sorted.
  std::vector<std::string> stray_files() const;

  bool contains(std::string_view name) const { return find(name) != nullptr; }
  // A shard without a tensor that the index places there is an Error, as is an unknown name.
  struct Found {
    const StoredTensor* tensor;
    Bytes bytes;
    std::shared_ptr<const SafetensorsFile> file;  // keeps both valid; file->mapping() alone keeps `bytes`
  };
  Found at(std::string_view name) const;
  // The shard of a tensor, counted in the order of shard_files().
  uint32_t shard_of(std::string_view name) const;

  std::vector<std::string_view> names() const;  // sorted; views into this object
  // Every tensor, shard by shard and in the order of the files. Where the index and the shards do not agree,
  // one Error says so when all were seen.
  void for_each(const std::function<void(const StoredTensor&)>& visit) const;
  std::vector<TensorSpec> specs() const;
  // The same with the file; the disagreements come back in words: empty when there are none.
  std::string scan(const std::function<void(const SafetensorsFile&, const StoredTensor&)>& visit) const;

  // Opens every shard and compares with the index both ways, total_size included.
  void verify() const;

 private:
  struct Name {
    uint64_t offset;  // in text_
    uint32_t length;
    uint32_t shard;
  };
  std::string_view text(const Name& name) const {
    return std::string_view(text_).substr(name.offset, name.length);
  }
  const Name* find(std::string_view name) const;
  std::shared_ptr<const SafetensorsFile> shard(uint32_t index) const;
  void read_index(const fs::path& path);
  void add_name(std::string_view name, uint32_t shard);

  fs::path directory_;
  std::vector<std::string> files_;
  std::string text_;         // all names, one after another
  std::vector<Name> names_;  // sorted
  std::optional<uint64_t> total_size_;
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const SafetensorsFile> open_;  // the shard last asked for
  mutable uint32_t open_index_ = 0;
};

struct ShardPlan {
  std::string file;
  std::vector<TensorSpec> tensors;
};

// Fills shards in the order of `tensors` up to `shard_bytes` of data each (a larger tensor gets a shard of
// its own) and names the files as released checkpoints do. One shard is `model.safetensors`.
std::vector<ShardPlan> plan_shards(std::span<const TensorSpec> tensors, uint64_t shard_bytes);
// "model-00001-of-000096.safetensors", number counted from 1.
std::string shard_file_name(int64_t number, int64_t count);
// The index of such a plan. Nothing to write for a single `model.safetensors`.
void write_checkpoint_index(const fs::path& directory, std::span<const ShardPlan> shards);

// Writes the shards, then the index. A directory that holds a checkpoint is refused: write into
// io::AtomicDirectory to replace one. Tensors may come in any order and in pieces; shards are opened at their
// first byte and finished at their last.
class CheckpointWriter {
 public:
  CheckpointWriter(fs::path directory, std::vector<ShardPlan> shards, Metadata metadata = {{"format", "pt"}});
  void append(std::string_view name, Bytes bytes);
  void commit();
  const TensorSpec& spec(std::string_view name) const;

 private:
  struct Place {
    uint32_t shard;
    uint32_t tensor;
  };
  const Place& place(std::string_view name) const;
  SafetensorsWriter& open(uint32_t shard);

  fs::path directory_;
  std::vector<ShardPlan> shards_;
  Metadata metadata_;
  std::map<std::string_view, Place> places_;  // views into shards_
  std::vector<std::unique_ptr<SafetensorsWriter>> writers_;
  std::vector<uint64_t> remaining_;  // bytes; a shard without any is finished
  std::vector<bool> done_;
};

}  // namespace godwit::io
