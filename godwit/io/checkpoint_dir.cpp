#include "godwit/io/checkpoint_dir.h"

#include <algorithm>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/io/json_sax.h"

namespace godwit::io {
namespace {

// A shard is a plain file of the directory: a name with a path in it could read any file of the machine.
bool is_shard_name(std::string_view name) {
  return name.size() <= 255 && name.ends_with(".safetensors") && !name.starts_with('.') &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos &&
         is_sane_tensor_name(name);
}

// {"metadata": {...}, "weight_map": {"tensor": "file"}}. Hands every pair to `add`; metadata may hold
// anything flat.
class IndexParser : public StrictSax {
 public:
  IndexParser(std::string where, std::function<void(const std::string& tensor, const std::string& file)> add)
      : StrictSax(std::move(where)), add_(std::move(add)) {}

  bool seen_map = false;
  std::optional<uint64_t> total_size;

  bool start_object(std::size_t) override {
    ++depth_;
    if (depth_ > 2 || (depth_ == 2 && section_ == Section::kOther)) refuse("an object");
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool key(string_t& key) override {
    key_ = key;
    if (depth_ != 1) return true;
    section_ = key == "weight_map" ? Section::kMap : key == "metadata" ? Section::kMetadata : Section::kOther;
    check(section_ != Section::kMap || !seen_map, "{}: weight_map comes twice", where_);
    seen_map |= section_ == Section::kMap;
    return true;
  }
  bool string(string_t& value) override {
    if (depth_ == 2 && section_ == Section::kMap) {
      add_(key_, value);
      return true;
    }
    return scalar("a string");
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ == 2 && section_ == Section::kMetadata && key_ == "total_size") total_size = value;
    return scalar("a number");
  }
  bool number_integer(number_integer_t) override { return scalar("a number"); }
  bool number_float(number_float_t, const string_t&) override { return scalar("a number"); }
  bool boolean(bool) override { return scalar("true or false"); }
  bool null() override { return scalar("null"); }

 protected:
  std::string place() const override { return fmt::format(" (at '{}')", key_); }

 private:
  enum class Section { kOther, kMetadata, kMap };

  bool scalar(std::string_view what) {
    if (depth_ == 0 || section_ == Section::kMap || (depth_ == 1 && section_ == Section::kMetadata))
      refuse(what);
    return true;
  }

  std::function<void(const std::string&, const std::string&)> add_;
  int depth_ = 0;
  Section section_ = Section::kOther;
  std::string key_;
};

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

CheckpointDir::CheckpointDir(fs::path directory) : directory_(std::move(directory)) {
  std::error_code error;
  check(fs::is_directory(directory_, error), "{} is not a directory", directory_.string());
  const fs::path single = directory_ / kSingleCheckpointFile;
  const fs::path index = directory_ / kCheckpointIndexFile;
  if (is_there(index)) {
    read_index(index);
    const bool names_single = std::ranges::find(files_, kSingleCheckpointFile) != files_.end();
    check(names_single || !is_there(single), "{} holds both {} and {}, which does not name it: remove one",
          directory_.string(), kSingleCheckpointFile, kCheckpointIndexFile);
  } else {
    check(is_there(single), "{} holds neither {} nor {}", directory_.string(), kSingleCheckpointFile,
          kCheckpointIndexFile);
    files_.emplace_back(kSingleCheckpointFile);
    for (const auto& tensor : shard(0)->tensors()) add_name(tensor.name, 0);
  }
  std::ranges::sort(names_, {}, [&](const Name& name) { return text(name); });
  const auto twice = std::ranges::adjacent_find(names_, {}, [&](const Name& name) { return text(name); });
  if (twice != names_.end()) fail("{}: tensor '{}' comes twice", index.string(), text(*twice));
}

void CheckpointDir::add_name(std::string_view name, uint32_t shard) {
  names_.push_back({text_.size(), static_cast<uint32_t>(name.size()), shard});
  text_ += name;
}

void CheckpointDir::read_index(const fs::path& path) {
  const std::string where = path.string();
  std::map<std::string, uint32_t, std::less<>> shard_of;
  IndexParser parser(where, [&](const std::string& tensor, const std::string& file) {
    check(is_sane_tensor_name(tensor),
          "{}: a tensor name is empty, too long or has control characters (after {} tensors)", where,
          names_.size());
    auto it = shard_of.find(file);
    if (it == shard_of.end()) {
      // As a JSON text, because it may hold anything.
      check(is_shard_name(file),
            "{}: tensor '{}' is said to be in {}, which is no .safetensors file of the directory", where,
            tensor, nlohmann::json(file).dump());
      it = shard_of.emplace(file, static_cast<uint32_t>(files_.size())).first;
      files_.push_back(file);
    }
    add_name(tensor, it->second);
  });
  {
    const MappedFile file(path);
    parser.parse(as_text(file.bytes()));
  }
  check(parser.seen_map && !names_.empty(), "{}: no weight_map with tensors", where);
  total_size_ = parser.total_size;
  std::vector<std::string> absent;
  for (const auto& file : files_) {
    if (!is_there(directory_ / file)) absent.push_back(file);
  }
  std::ranges::sort(absent);
  check(absent.empty(), "{}: {} of {} files are absent: {}", where, absent.size(), files_.size(),
        first_ten(absent, absent.size()));
  text_.shrink_to_fit();
  names_.shrink_to_fit();
}

const CheckpointDir::Name* CheckpointDir::find(std::string_view name) const {
  const auto it = std::ranges::lower_bound(names_, name, {}, [&](const Name& entry) { return text(entry); });
  return it != names_.end() && text(*it) == name ? &*it : nullptr;
}

std::shared_ptr<const SafetensorsFile> CheckpointDir::shard(uint32_t index) const {
  const std::lock_guard lock(mutex_);
  if (!open_ || open_index_ != index) {
    open_.reset();
    open_ = std::make_shared<const SafetensorsFile>(directory_ / files_[index]);
    open_index_ = index;
  }
  return open_;
}

CheckpointDir::Found CheckpointDir::at(std::string_view name) const {
  const Name* entry = find(name);
  check(entry != nullptr, "{}: no tensor '{}'", directory_.string(), name);
  std::shared_ptr<const SafetensorsFile> file = shard(entry->shard);
  const StoredTensor* tensor = file->find(name);
  check(tensor != nullptr, "{}: no tensor '{}', although the index places it there", file->path().string(),
        name);
  return {tensor, file->bytes(*tensor), std::move(file)};
}

uint32_t CheckpointDir::shard_of(std::string_view name) const {
  const Name* entry = find(name);
  check(entry != nullptr, "{}: no tensor '{}'", directory_.string(), name);
  return entry->shard;
}

std::vector<std::string_view> CheckpointDir::names() const {
  std::vector<std::string_view> result;
  result.reserve(names_.size());
  for (const auto& name : names_) result.push_back(text(name));
  return result;
}

std::vector<std::string> CheckpointDir::stray_files() const {
  std::vector<std::string> out;
  for (const auto& entry : fs::directory_iterator(directory_)) {
    const std::string name = entry.path().filename().string();
    if (is_shard_name(name) && std::ranges::find(files_, name) == files_.end()) out.push_back(name);
  }
  std::ranges::sort(out);
  return out;
}

std::string CheckpointDir::scan(
    const std::function<void(const SafetensorsFile&, const StoredTensor&)>& visit) const {
  std::vector<bool> seen(names_.size());
  CaseList unlisted, absent;
  for (uint32_t s = 0; s < files_.size(); ++s) {
    const auto file = shard(s);
    for (const auto& tensor : file->tensors()) {
      const Name* entry = find(tensor.name);
      if (!entry || entry->shard != s) {
        unlisted.add(tensor.name + " in " + files_[s]);
        continue;
      }
      seen[entry - names_.data()] = true;
      visit(*file, tensor);
    }
  }
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!seen[i]) absent.add(fmt::format("{} in {}", text(names_[i]), files_[names_[i].shard]));
  }
  std::string text;
  absent.print("tensors are not in the shard where the index places them", "; ", text);
  unlisted.print("tensors of the shards are not in the index there", "; ", text);
  return text;
}

void CheckpointDir::for_each(const std::function<void(const StoredTensor&)>& visit) const {
  const std::string faults = scan([&](const SafetensorsFile&, const StoredTensor& tensor) { visit(tensor); });
  check(faults.empty(), "{}: {}", directory_.string(), faults);
}

std::vector<TensorSpec> CheckpointDir::specs() const {
  std::vector<TensorSpec> result;
  result.reserve(names_.size());
  for_each([&](const StoredTensor& tensor) { result.push_back(tensor); });
  return result;
}

void CheckpointDir::verify() const {
  uint64_t bytes = 0;
  for_each([&](const StoredTensor& tensor) { bytes += tensor.end - tensor.begin; });
  check(!total_size_ || *total_size_ == bytes, "{}: total_size is {}, the tensors have {} bytes",
        (directory_ / kCheckpointIndexFile).string(), total_size_.value_or(0), bytes);
}

std::string shard_file_name(int64_t number, int64_t count) {
  if (count == 1) return std::string(kSingleCheckpointFile);
  return fmt::format("model-{:05d}-of-{:06d}.safetensors", number, count);
}

std::vector<ShardPlan> plan_shards(std::span<const TensorSpec> tensors, uint64_t shard_bytes) {
  std::vector<ShardPlan> shards(1);
  uint64_t used = 0;
  for (const auto& spec : tensors) {
    const uint64_t bytes = checked_tensor_bytes(spec, "checkpoint");
    if (used > 0 && bytes > 0 && used + bytes > shard_bytes) {
      shards.emplace_back();
      used = 0;
    }
    shards.back().tensors.push_back(spec);
    used += bytes;
  }
  const auto count = static_cast<int64_t>(shards.size());
  for (int64_t i = 0; i < count; ++i) shards[i].file = shard_file_name(i + 1, count);
  return shards;
}

void write_checkpoint_index(const fs::path& directory, std::span<const ShardPlan> shards) {
  if (shards.size() == 1 && shards[0].file == kSingleCheckpointFile) return;
  uint64_t total = 0;
  std::map<std::string_view, std::string_view> file_of;
  for (const auto& shard : shards) {
    for (const auto& spec : shard.tensors) {
      total += checked_tensor_bytes(spec, directory.string());
      check(file_of.emplace(spec.name, shard.file).second, "{}: tensor '{}' comes twice", directory.string(),
            spec.name);
    }
  }
  AtomicFile file(directory / kCheckpointIndexFile);
  file.append(fmt::format("{{\n  \"metadata\": {{\"total_size\": {}}},\n  \"weight_map\": {{", total));
  const char* separator = "\n";
  for (const auto& [name, shard] : file_of) {
    file.append(
        fmt::format("{}    {}: {}", separator, nlohmann::json(name).dump(), nlohmann::json(shard).dump()));
    separator = ",\n";
  }
  file.append("\n  }\n}\n");
  file.commit();
}

CheckpointWriter::CheckpointWriter(fs::path directory, std::vector<ShardPlan> shards, Metadata metadata)
    : directory_(std::move(directory)), shards_(std::move(shards)), metadata_(std::move(metadata)) {
  for (const auto& entry : fs::directory_iterator(directory_)) {
    const fs::path name = entry.path().filename();
    check(name.extension() != ".safetensors" && name != kCheckpointIndexFile,
          "{} already holds a checkpoint ({})", directory_.string(), name.string());
  }
  std::set<std::string_view> files;
  for (uint32_t s = 0; s < shards_.size(); ++s) {
    check(is_shard_name(shards_[s].file) && files.insert(shards_[s].file).second,
          "{}: '{}' cannot be the name of a shard", directory_.string(), shards_[s].file);
    remaining_.push_back(0);
    for (uint32_t t = 0; t < shards_[s].tensors.size(); ++t) {
      const TensorSpec& spec = shards_[s].tensors[t];
      check(places_.emplace(spec.name, Place{s, t}).second, "{}: tensor '{}' comes twice",
            directory_.string(), spec.name);
      remaining_[s] += checked_tensor_bytes(spec, directory_.string());
    }
  }
  writers_.resize(shards_.size());
  done_.resize(shards_.size());
}

const CheckpointWriter::Place& CheckpointWriter::place(std::string_view name) const {
  const auto it = places_.find(name);
  check(it != places_.end(), "{}: tensor '{}' was not announced", directory_.string(), name);
  return it->second;
}

const TensorSpec& CheckpointWriter::spec(std::string_view name) const {
  const Place& at = place(name);
  return shards_[at.shard].tensors[at.tensor];
}

SafetensorsWriter& CheckpointWriter::open(uint32_t shard) {
  auto& writer = writers_[shard];
  if (!writer) {
    writer = std::make_unique<SafetensorsWriter>(directory_ / shards_[shard].file, shards_[shard].tensors,
                                                 metadata_);
  }
  return *writer;
}

void CheckpointWriter::append(std::string_view name, Bytes bytes) {
  const uint32_t shard = place(name).shard;
  if (bytes.empty()) return;
  check(!done_[shard], "{}: tensor '{}' already has all its bytes",
        (directory_ / shards_[shard].file).string(), name);
  open(shard).append(name, bytes);
  remaining_[shard] -= bytes.size();
  if (remaining_[shard] > 0) return;
  writers_[shard]->commit();
  writers_[shard].reset();
  done_[shard] = true;
}

void CheckpointWriter::commit() {
  for (uint32_t s = 0; s < shards_.size(); ++s) {
    if (done_[s]) continue;
    open(s).commit();  // a shard without any bytes is complete; otherwise this names the tensor that is not
    writers_[s].reset();
    done_[s] = true;
  }
  write_checkpoint_index(directory_, shards_);
}

}  // namespace godwit::io
