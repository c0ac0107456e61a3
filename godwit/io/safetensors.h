// Safetensors files (github.com/huggingface/safetensors, "Format"):
//   8 bytes   little-endian N, the length of the header
//   N bytes   JSON {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, ...,
//   "__metadata__": {"key": "text"}} the rest  tensor bytes, row-major, little-endian; the ranges cover it
//   without hole or overlap
// A file that breaks any of this is refused with the file, the tensor and what differs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"
#include "godwit/io/tensor_spec.h"

namespace godwit::io {

inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;  // the limit of the reference implementation

using Metadata = std::map<std::string, std::string>;

struct StoredTensor : TensorSpec {
  uint64_t begin = 0;  // byte range in the file
  uint64_t end = 0;
};

class SafetensorsFile {
 public:
  explicit SafetensorsFile(fs::path path);

  const fs::path& path() const { return file_->path(); }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of the file
  const Metadata& metadata() const { return metadata_; }
  const StoredTensor* find(std::string_view name) const;
  const StoredTensor& at(std::string_view name) const;  // an unknown name is an Error

  // Straight from the map, without a copy. Aligned to the element size in files of SafetensorsWriter and of
  // the Python package, not in every valid file.
  Bytes bytes(const StoredTensor& tensor) const {
    return file_->bytes().subspan(tensor.begin, tensor.end - tensor.begin);
  }
  // Keep this as long as the bytes are in use. Pages are copy-on-write: an edit in memory never reaches the
  // file.
  const std::shared_ptr<const MappedFile>& mapping() const { return file_; }

 private:
  std::shared_ptr<const MappedFile> file_;
  std::vector<StoredTensor> tensors_;
  std::vector<uint32_t> by_name_;
  Metadata metadata_;
};

// Writes the header at once, then takes the bytes of each tensor in pieces of any size, tensors in any order,
// so that memory stays bounded. The file appears under its name at commit(), which refuses while bytes are
// missing. On disk wider element types come first (every tensor is then aligned), otherwise the order of
// `tensors` is kept; the data begins at a multiple of 64.
class SafetensorsWriter {
 public:
  SafetensorsWriter(fs::path path, std::vector<TensorSpec> tensors, const Metadata& metadata = {});

  void append(std::string_view name, Bytes bytes);  // the next bytes of the tensor
  void commit();
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of the file

 private:
  size_t index_of(std::string_view name) const;

  AtomicFile file_;
  std::vector<StoredTensor> tensors_;
  std::vector<uint64_t> next_;  // where the next bytes of each tensor go
  std::map<std::string, size_t, std::less<>> index_;
};

}  // namespace godwit::io
