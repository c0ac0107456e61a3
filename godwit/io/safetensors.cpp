#include "godwit/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/io/json_sax.h"

namespace godwit::io {
namespace {

static_assert(std::endian::native == std::endian::little, "tensor bytes are used as they lie in the file");

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr uint64_t kAlignment = 64;

// Reads the header. Offsets stay relative to the data, as they are written there.
class HeaderParser : public StrictSax {
 public:
  using StrictSax::StrictSax;

  std::vector<StoredTensor> tensors;
  Metadata metadata;

  bool start_object(std::size_t) override {
    if (state_ == State::kStart) return enter(State::kFile);
    if (state_ == State::kEntry) return enter(in_metadata_ ? State::kMetadata : State::kTensor);
    refuse("an object");
  }

  bool key(string_t& key) override {
    switch (state_) {
      case State::kFile:
        return begin_entry(key);
      case State::kMetadata:
        check(metadata.try_emplace(key).second, "{}: metadata key '{}' comes twice", where_, key);
        field_ = key;
        return enter(State::kMetadataValue);
      case State::kTensor:
        return begin_field(key);
      default:
        refuse("a key");
    }
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadataValue) {
      metadata[field_] = value;
      return enter(State::kMetadata);
    }
    if (state_ != State::kDtype) refuse("a string");
    const auto dtype = parse_dtype(value);
    check(dtype.has_value(), "{}: tensor '{}' has the unknown dtype '{}'", where_, tensor().name, value);
    tensor().dtype = *dtype;
    return enter(State::kTensor);
  }

  bool start_array(std::size_t) override {
    if (state_ == State::kShape && !in_array_) return in_array_ = true;
    if (state_ == State::kOffsets && !in_array_) return in_array_ = true;
    refuse("an array");
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) refuse("a number");
    if (state_ == State::kShape) {
      check(value <= INT64_MAX, "{}: tensor '{}' has a dimension of {}", where_, tensor().name, value);
      tensor().shape.push_back(static_cast<int64_t>(value));
    } else {
      offsets_.push_back(value);
    }
    return true;
  }

  bool end_array() override {
    if (state_ == State::kOffsets) {
      check(offsets_.size() == 2, "{}: tensor '{}' has {} data_offsets instead of 2", where_, tensor().name,
            offsets_.size());
      tensor().begin = offsets_[0];
      tensor().end = offsets_[1];
    }
    in_array_ = false;
    return enter(State::kTensor);
  }

  bool end_object() override {
    if (state_ == State::kTensor) end_tensor();
    return enter(state_ == State::kFile ? State::kDone : State::kFile);
  }

 protected:
  std::string place() const override {
    return tensors.empty() ? std::string() : fmt::format(" (at or after tensor '{}')", tensors.back().name);
  }

 private:
  enum class State {
    kStart,
    kFile,
    kEntry,
    kTensor,
    kDtype,
    kShape,
    kOffsets,
    kMetadata,
    kMetadataValue,
    kDone
  };

  bool enter(State state) {
    state_ = state;
    return true;
  }
  StoredTensor& tensor() { return tensors.back(); }

  bool begin_entry(const std::string& name) {
    in_metadata_ = name == kMetadataKey;
    if (in_metadata_) {
      check(!seen_metadata_, "{}: {} comes twice", where_, kMetadataKey);
      seen_metadata_ = true;
    } else {
      check(is_sane_tensor_name(name),
            "{}: a tensor name is empty, too long or has control characters (after {} tensors)", where_,
            tensors.size());
      tensors.emplace_back().name = name;
      has_dtype_ = has_shape_ = has_offsets_ = false;
      offsets_.clear();
    }
    return enter(State::kEntry);
  }

  bool begin_field(const std::string& key) {
    const auto once = [&](bool& seen, State state) {
      check(!seen, "{}: tensor '{}' has '{}' twice", where_, tensor().name, key);
      seen = true;
      return enter(state);
    };
    if (key == "dtype") return once(has_dtype_, State::kDtype);
    if (key == "shape") return once(has_shape_, State::kShape);
    if (key == "data_offsets") return once(has_offsets_, State::kOffsets);
    fail("{}: tensor '{}' has the unknown key '{}'", where_, tensor().name, key);
  }

  void end_tensor() {
    const char* missing = !has_dtype_     ? "dtype"
                          : !has_shape_   ? "shape"
                          : !has_offsets_ ? "data_offsets"
                                          : nullptr;
    check(!missing, "{}: tensor '{}' has no {}", where_, tensor().name, missing ? missing : "");
  }

  State state_ = State::kStart;
  bool in_metadata_ = false, seen_metadata_ = false, in_array_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  std::string field_;
  std::vector<uint64_t> offsets_;
};

// Places that contradict each other: one error with the first ten.
class Faults {
 public:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    if (count_++ < 10) first_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }
  void raise(const std::string& where) const {
    if (count_ == 0) return;
    std::string text = count_ == 1 ? "" : fmt::format("{} faults: ", count_);
    for (const auto& fault : first_) text += (&fault == &first_.front() ? "" : "; ") + fault;
    fail("{}: {}{}", where, text, count_ > first_.size() ? "; ..." : "");
  }

 private:
  size_t count_ = 0;
  std::vector<std::string> first_;
};

// The ranges must have the size of their tensors and cover [0, data_size) exactly. Sorts by place in the
// file.
void check_layout(std::vector<StoredTensor>& tensors, uint64_t data_size, const std::string& where) {
  Faults faults;
  for (const auto& t : tensors) {
    const auto bytes = tensor_bytes(t.dtype, t.shape);
    if (t.begin > t.end || t.end > data_size) {
      faults.add("tensor '{}' lies at bytes {} to {} of {} data bytes", t.name, t.begin, t.end, data_size);
    } else if (!bytes) {
      faults.add("tensor '{}' has the impossible shape {}", t.name, shape_text(t.shape));
    } else if (t.end - t.begin != *bytes) {
      faults.add("tensor '{}' {} {} needs {} bytes, its data_offsets give {}", t.name, dtype_name(t.dtype),
                 shape_text(t.shape), *bytes, t.end - t.begin);
    }
  }
  faults.raise(where);
  std::ranges::stable_sort(tensors, {}, [](const StoredTensor& t) { return std::pair(t.begin, t.end); });
  uint64_t end = 0;
  const StoredTensor* before = nullptr;
  for (const auto& t : tensors) {
    if (t.begin < end)
      faults.add("tensors '{}' and '{}' overlap at byte {} of the data", before->name, t.name, t.begin);
    if (t.begin > end) faults.add("{} bytes before tensor '{}' belong to no tensor", t.begin - end, t.name);
    if (t.end >= end) before = &t;
    end = std::max(end, t.end);
  }
  if (end != data_size) faults.add("{} bytes after the last tensor belong to no tensor", data_size - end);
  faults.raise(where);
}

}  // namespace

SafetensorsFile::SafetensorsFile(fs::path path)
    : file_(std::make_shared<const MappedFile>(std::move(path), MappedFile::Mode::kCopyOnWrite)) {
  const std::string where = file_->path().string();
  const Bytes all = file_->bytes();
  check(all.size() >= 8, "{}: {} bytes are too few for a safetensors file", where, all.size());
  uint64_t length = 0;
  std::memcpy(&length, all.data(), 8);
  check(length <= kMaxSafetensorsHeader,
        "{}: a header of {} bytes exceeds the limit of {}: not a safetensors file?", where, length,
        kMaxSafetensorsHeader);
  check(length <= all.size() - 8, "{}: truncated: the header has {} bytes, only {} follow", where, length,
        all.size() - 8);
  const std::string_view header = as_text(all.subspan(8, length));
  check(header.starts_with('{'), "{}: the header does not begin with '{{': not a safetensors file?", where);

  HeaderParser parser(where);
  parser.parse(header);
  tensors_ = std::move(parser.tensors);
  metadata_ = std::move(parser.metadata);
  const uint64_t data = 8 + length;
  check_layout(tensors_, all.size() - data, where);
  for (auto& tensor : tensors_) {
    tensor.begin += data;
    tensor.end += data;
  }
  by_name_.resize(tensors_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0);
  const auto name = [&](uint32_t i) -> const std::string& { return tensors_[i].name; };
  std::ranges::sort(by_name_, {}, name);
  const auto twice = std::ranges::adjacent_find(by_name_, {}, name);
  if (twice != by_name_.end()) fail("{}: tensor '{}' comes twice", where, name(*twice));
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto it = std::ranges::lower_bound(by_name_, name, {},
                                           [&](uint32_t i) { return std::string_view(tensors_[i].name); });
  return it != by_name_.end() && tensors_[*it].name == name ? &tensors_[*it] : nullptr;
}

const StoredTensor& SafetensorsFile::at(std::string_view name) const {
  const StoredTensor* tensor = find(name);
  check(tensor != nullptr, "{}: no tensor '{}'", path().string(), name);
  return *tensor;
}

SafetensorsWriter::SafetensorsWriter(fs::path path, std::vector<TensorSpec> tensors, const Metadata& metadata)
    : file_(std::move(path)) {
  const std::string where = file_.path().string();
  std::ranges::stable_sort(tensors, std::greater{},
                           [](const TensorSpec& spec) { return dtype_size(spec.dtype); });
  std::string header = "{";
  uint64_t offset = 0;
  try {
    if (!metadata.empty()) header += fmt::format("\"{}\":{}", kMetadataKey, nlohmann::json(metadata).dump());
    for (auto& spec : tensors) {
      check(is_sane_tensor_name(spec.name) && spec.name != kMetadataKey,
            "{}: '{}' cannot be the name of a tensor", where, spec.name);
      check(index_.emplace(spec.name, tensors_.size()).second, "{}: tensor '{}' comes twice", where,
            spec.name);
      const uint64_t bytes = checked_tensor_bytes(spec, where);
      header += fmt::format("{}{}:{{\"dtype\":\"{}\",\"shape\":{},\"data_offsets\":[{},{}]}}",
                            header.size() > 1 ? "," : "", nlohmann::json(spec.name).dump(),
                            dtype_name(spec.dtype), shape_text(spec.shape), offset, offset + bytes);
      tensors_.push_back({std::move(spec), offset, offset + bytes});
      offset += bytes;
    }
  } catch (const nlohmann::json::exception& error) {
    fail("{}: a name or metadata text is not UTF-8: {}", where, error.what());
  }
  header += '}';
  header.append((kAlignment - (8 + header.size()) % kAlignment) % kAlignment, ' ');
  check(header.size() <= kMaxSafetensorsHeader, "{}: a header of {} bytes exceeds the limit of {}", where,
        header.size(), kMaxSafetensorsHeader);

  const uint64_t data = 8 + header.size();
  file_.reserve(data + offset);
  const uint64_t length = header.size();
  file_.append(std::as_bytes(std::span(&length, 1)));
  file_.append(header);
  for (auto& tensor : tensors_) {
    tensor.begin += data;
    tensor.end += data;
    next_.push_back(tensor.begin);
  }
}

size_t SafetensorsWriter::index_of(std::string_view name) const {
  const auto it = index_.find(name);
  check(it != index_.end(), "{}: tensor '{}' was not announced", file_.path().string(), name);
  return it->second;
}

void SafetensorsWriter::append(std::string_view name, Bytes bytes) {
  const size_t i = index_of(name);
  const StoredTensor& tensor = tensors_[i];
  check(bytes.size() <= tensor.end - next_[i],
        "{}: tensor '{}' {} {} has {} bytes, {} more were given after {}", file_.path().string(), name,
        dtype_name(tensor.dtype), shape_text(tensor.shape), tensor.end - tensor.begin, bytes.size(),
        next_[i] - tensor.begin);
  file_.write_at(next_[i], bytes);
  next_[i] += bytes.size();
}

void SafetensorsWriter::commit() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const StoredTensor& tensor = tensors_[i];
    check(next_[i] == tensor.end, "{}: tensor '{}' got {} of its {} bytes", file_.path().string(),
          tensor.name, next_[i] - tensor.begin, tensor.end - tensor.begin);
  }
  file_.commit();
}

}  // namespace godwit::io
