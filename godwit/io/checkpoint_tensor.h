// Stored tensors as at::Tensor and back. A change of element type happens only where the caller asks for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/safetensors.h"

namespace godwit::io {

at::ScalarType to_scalar_type(Dtype dtype);
Dtype from_scalar_type(at::ScalarType type);  // a type that no file holds (complex, quantised) is an Error
TensorSpec spec_of(std::string name, const at::Tensor& tensor);

// Zero-copy CPU tensor on the mapped file, which it keeps alive. In-place edits stay in memory, but every
// view of the same file sees them: clone() what is to be changed. Bytes that are not aligned to the element
// size are copied.
at::Tensor tensor_view(const CheckpointDir& checkpoint, std::string_view name);
at::Tensor tensor_view(const SafetensorsFile& file, const StoredTensor& tensor);

enum class Cast {
  kRefuse,    // another type in the file is an Error
  kFloating,  // F64, F32, F16 and BF16 convert into each other; anything else is an Error
};
// An own copy in the wanted type.
at::Tensor read_tensor(const CheckpointDir& checkpoint, std::string_view name, at::ScalarType type,
                       Cast cast);
// Into an existing tensor (any device, any strides) of exactly the stored shape; its type is the wanted one.
void read_into(const CheckpointDir& checkpoint, std::string_view name, Cast cast, at::Tensor& out);

// All bytes of one announced tensor. Type and shape must be the announced ones; device and strides may be
// any.
void write_tensor(CheckpointWriter& writer, std::string_view name, const at::Tensor& tensor);

// One small file at once.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
void save_tensors(const fs::path& path, const NamedTensors& tensors, const Metadata& metadata = {});
NamedTensors load_tensors(const fs::path& path);  // views, in the order of the file

}  // namespace godwit::io
