#include "godwit/model/weight_format.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "godwit/base/check.h"
#include "godwit/io/mxfp4.h"
#include "godwit/ops/mxfp4_limit.h"

namespace godwit {
namespace {

using at::Tensor;
using Experts = WeightFormat::Experts;

std::span<uint8_t> bytes_of(const Tensor& t) {
  return {t.data_ptr<uint8_t>(), static_cast<size_t>(t.numel())};
}

// Values and scales of a parameter of shape [.., out, in].
struct PackedShape {
  std::vector<int64_t> values, scales;
  at::ScalarType value_type, scale_type;
};

PackedShape packed_shape(const ParamInfo& info, const WeightFormat& format) {
  PackedShape out{info.shape, info.shape, at::kChar, at::kFloat};
  if (info.role != ParamRole::kExperts || format.experts == Experts::kInt8) {
    out.scales.pop_back();
    return out;
  }
  check(info.shape.back() % io::kMxfp4Group == 0,
        "{}: MXFP4 needs an input width that is a multiple of {}, got {}", info.name, io::kMxfp4Group,
        info.shape.back());
  out.values.back() /= 2;
  out.scales.back() /= io::kMxfp4Group;
  out.value_type = out.scale_type = at::kByte;
  return out;
}

}  // namespace

WeightFormat weight_format_of(const std::string& name) {
  if (name.empty()) return {};
  if (name == "int8") return {.experts = Experts::kInt8, .int8_linear = true};
  check(name == "mxfp4" || name == "mxfp4+int8", "weights: expected int8, mxfp4 or mxfp4+int8, got \"{}\"",
        name);
  return {.experts = Experts::kMxfp4, .int8_linear = name != "mxfp4"};
}

Matrix& as_matrix(const ParamInfo& info, Tensor& value) {
  check(info.is_matrix, "{} is not a matrix", info.name);
  return static_cast<Matrix&>(value);
}

void allocate_param(const ParamInfo& info, const WeightFormat& format, at::Device device,
                    at::ScalarType dtype, Tensor& value) {
  const auto on = at::TensorOptions().device(device);
  if (!format.packs(info)) {
    value = at::empty(info.shape, on.dtype(info.keep_fp32 ? at::kFloat : dtype));
    return;
  }
  const PackedShape shape = packed_shape(info, format);
  as_matrix(info, value) = Matrix(at::empty(shape.values, on.dtype(shape.value_type)),
                                  at::empty(shape.scales, on.dtype(shape.scale_type)));
}

void store_param(const ParamInfo& info, int64_t piece, const Tensor& w, Tensor& value) {
  const at::NoGradGuard no_grad;
  const auto place = [&](const Tensor& t) { return piece < 0 ? t : t.select(0, piece); };
  if (!info.is_matrix || !as_matrix(info, value).packed()) {
    place(value).copy_(w.reshape(place(value).sizes()));
    return;
  }
  const Matrix& packed = as_matrix(info, value);
  if (packed.scalar_type() == at::kChar) {
    const auto [values, scale] = ops::quantize_int8(w);
    place(packed).copy_(values);
    place(packed.scale).copy_(scale);
    return;
  }
  const Tensor weights = w.to(at::kCPU, at::kFloat).contiguous();
  const Tensor values = at::empty(place(packed).sizes(), at::kByte);
  const Tensor scales = at::empty(place(packed.scale).sizes(), at::kByte);
  io::mxfp4_quantize({weights.const_data_ptr<float>(), static_cast<size_t>(weights.numel())},
                     bytes_of(values), bytes_of(scales), io::Mxfp4ScaleRule::kCompressedTensors);
  ops::check_mxfp4_scales(info.name, scales, packed.device());
  place(packed).copy_(values);
  place(packed.scale).copy_(scales);
}

void pack_weights(const ModelConfig& config, ModelWeights& weights, const WeightFormat& format) {
  for_each_param(config, weights, [&](const ParamInfo& info, Tensor& value) {
    if (!format.packs(info)) return;
    const Tensor floating = value;
    allocate_param(info, format, floating.device(), floating.scalar_type(), value);
    store_param(info, /*piece=*/-1, floating, value);
  });
}

int64_t weight_bytes(const ModelConfig& config, ModelWeights& weights) {
  int64_t total = 0;
  for_each_param(config, weights, [&](const ParamInfo& info, Tensor& value) {
    total += info.is_matrix ? as_matrix(info, value).bytes() : static_cast<int64_t>(value.nbytes());
  });
  return total;
}

int64_t weight_bytes(const ModelConfig& config, const WeightFormat& format, at::ScalarType dtype) {
  ModelWeights weights = weight_structure(config);
  for_each_param(config, weights, [&](const ParamInfo& info, Tensor& value) {
    allocate_param(info, format, at::kMeta, dtype, value);
  });
  return weight_bytes(config, weights);
}

}  // namespace godwit
