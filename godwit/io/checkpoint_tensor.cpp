#include "godwit/io/checkpoint_tensor.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>

#include "godwit/base/check.h"

namespace godwit::io {
namespace {

at::Tensor view_of(const StoredTensor& stored, Bytes bytes, std::shared_ptr<const MappedFile> mapping) {
  const auto options = at::TensorOptions().dtype(to_scalar_type(stored.dtype));
  if (bytes.empty()) return at::empty(stored.shape, options);
  void* data = const_cast<std::byte*>(bytes.data());  // the map is copy-on-write
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(dtype_size(stored.dtype)) == 0) {
    return at::from_blob(
        data, stored.shape, [mapping = std::move(mapping)](void*) {}, options);
  }
  at::Tensor copy = at::empty(stored.shape, options);
  std::copy(bytes.begin(), bytes.end(), static_cast<std::byte*>(copy.mutable_data_ptr()));
  return copy;
}

bool is_plain_float(at::ScalarType type) {
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

void check_cast(const CheckpointDir& checkpoint, std::string_view name, at::ScalarType from,
                at::ScalarType to, Cast cast) {
  const bool allowed = from == to || (cast == Cast::kFloating && is_plain_float(from) && is_plain_float(to));
  check(allowed, "{}: tensor '{}' is {}, expected {}", checkpoint.path().string(), name, c10::toString(from),
        c10::toString(to));
}

Bytes bytes_of(const at::Tensor& cpu_contiguous) {
  return {static_cast<const std::byte*>(cpu_contiguous.const_data_ptr()), cpu_contiguous.nbytes()};
}

at::Tensor to_storage(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).contiguous();
}

}  // namespace

at::ScalarType to_scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::F64:
      return at::kDouble;
    case Dtype::F32:
      return at::kFloat;
    case Dtype::F16:
      return at::kHalf;
    case Dtype::BF16:
      return at::kBFloat16;
    case Dtype::I64:
      return at::kLong;
    case Dtype::I32:
      return at::kInt;
    case Dtype::I16:
      return at::kShort;
    case Dtype::I8:
      return at::kChar;
    case Dtype::U64:
      return at::kUInt64;
    case Dtype::U32:
      return at::kUInt32;
    case Dtype::U16:
      return at::kUInt16;
    case Dtype::U8:
      return at::kByte;
    case Dtype::BOOL:
      return at::kBool;
    case Dtype::F8_E4M3:
      return at::kFloat8_e4m3fn;
    case Dtype::F8_E5M2:
      return at::kFloat8_e5m2;
    case Dtype::F8_E8M0:
      return at::kFloat8_e8m0fnu;
  }
  fail("unknown dtype {}", static_cast<int>(dtype));
}

Dtype from_scalar_type(at::ScalarType type) {
  for (int i = 0; i <= static_cast<int>(Dtype::F8_E8M0); ++i) {
    if (to_scalar_type(static_cast<Dtype>(i)) == type) return static_cast<Dtype>(i);
  }
  fail("a tensor of type {} cannot be stored in a safetensors file", c10::toString(type));
}

TensorSpec spec_of(std::string name, const at::Tensor& tensor) {
  return {std::move(name), from_scalar_type(tensor.scalar_type()), tensor.sizes().vec()};
}

at::Tensor tensor_view(const CheckpointDir& checkpoint, std::string_view name) {
  const CheckpointDir::Found found = checkpoint.at(name);
  return view_of(*found.tensor, found.bytes, found.file->mapping());
}

at::Tensor tensor_view(const SafetensorsFile& file, const StoredTensor& tensor) {
  return view_of(tensor, file.bytes(tensor), file.mapping());
}

at::Tensor read_tensor(const CheckpointDir& checkpoint, std::string_view name, at::ScalarType type,
                       Cast cast) {
  const at::Tensor view = tensor_view(checkpoint, name);
  check_cast(checkpoint, name, view.scalar_type(), type, cast);
  return view.to(type, /*non_blocking=*/false, /*copy=*/true);
}

void read_into(const CheckpointDir& checkpoint, std::string_view name, Cast cast, at::Tensor& out) {
  const at::Tensor view = tensor_view(checkpoint, name);
  check_cast(checkpoint, name, view.scalar_type(), out.scalar_type(), cast);
  check(view.sizes() == out.sizes(), "{}: tensor '{}' has the shape {}, expected {}",
        checkpoint.path().string(), name, shape_text(view.sizes().vec()), shape_text(out.sizes().vec()));
  const at::NoGradGuard no_grad;
  out.copy_(view);
}

void write_tensor(CheckpointWriter& writer, std::string_view name, const at::Tensor& tensor) {
  const TensorSpec& spec = writer.spec(name);
  check(to_scalar_type(spec.dtype) == tensor.scalar_type() && tensor.sizes() == at::IntArrayRef(spec.shape),
        "tensor '{}' was announced as {} {}, given {} {}", name, dtype_name(spec.dtype),
        shape_text(spec.shape), c10::toString(tensor.scalar_type()), shape_text(tensor.sizes().vec()));
  writer.append(name, bytes_of(to_storage(tensor)));
}

void save_tensors(const fs::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back(spec_of(name, tensor));
  SafetensorsWriter writer(path, specs, metadata);
  for (const auto& [name, tensor] : tensors) writer.append(name, bytes_of(to_storage(tensor)));
  writer.commit();
}

NamedTensors load_tensors(const fs::path& path) {
  const SafetensorsFile file(path);
  NamedTensors tensors;
  for (const auto& stored : file.tensors()) tensors.emplace_back(stored.name, tensor_view(file, stored));
  return tensors;
}

}  // namespace godwit::io
