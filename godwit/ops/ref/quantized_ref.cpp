#include "godwit/ops/ref/quantized_ref.h"

#include <ATen/ATen.h>

#include <limits>
#include <map>
#include <mutex>
#include <string>

namespace godwit::ops::ref {
namespace {

// [16] of the codes' numbers, kept by device: a step that is being recorded copies nothing from the host.
at::Tensor code_values(at::Device device) {
  static std::mutex mutex;
  static auto* const tables =
      new std::map<std::string, at::Tensor>;  // never destroyed: the driver may be gone
  const std::lock_guard lock(mutex);
  at::Tensor& table = (*tables)[device.str()];
  if (!table.defined()) {
    table = at::tensor({0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                        -3.0f, -4.0f, -6.0f},
                       at::kFloat)
                .to(device);
  }
  return table;
}

}  // namespace

at::Tensor dequantize_int8(const at::Tensor& values, const at::Tensor& scale) {
  return values.to(at::kFloat) * scale.unsqueeze(-1);
}

at::Tensor dequantize_mxfp4(const at::Tensor& packed, const at::Tensor& scale) {
  const at::Tensor table = code_values(packed.device());
  const at::Tensor codes = at::stack({packed.bitwise_and(15), packed.bitwise_right_shift(4)}, -1);
  auto sizes = packed.sizes().vec();
  sizes.back() *= 2;
  const at::Tensor elements = table.index_select(0, codes.reshape(-1).to(at::kLong)).view(sizes);
  const at::Tensor power = at::pow(2.0, scale.to(at::kDouble) - 127)
                               .masked_fill(scale.eq(255), std::numeric_limits<double>::quiet_NaN())
                               .to(at::kFloat);
  return elements * power.repeat_interleave(32, -1);
}

at::Tensor dequantize(const at::Tensor& values, const at::Tensor& scale) {
  return values.scalar_type() == at::kChar ? dequantize_int8(values, scale) : dequantize_mxfp4(values, scale);
}

}  // namespace godwit::ops::ref
