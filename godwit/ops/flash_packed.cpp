#include "godwit/ops/flash_packed.h"

#include <ATen/ATen.h>
#include <ATen/ops/_flash_attention_forward.h>

#include <algorithm>
#include <optional>

namespace godwit::ops {
namespace {

using at::Tensor;

// Offsets on the device, by a copy that nobody waits for, and the longest sequence.
struct Lengths {
  Tensor offsets;
  int64_t longest = 0;
};
Lengths lengths_of(const Tensor& cu, at::Device device) {
  const Tensor offsets = cu.contiguous();
  const auto* at = offsets.const_data_ptr<int64_t>();
  Lengths out;
  for (int64_t n = 0; n + 1 < offsets.numel(); ++n) out.longest = std::max(out.longest, at[n + 1] - at[n]);
  out.offsets = offsets.to(at::kInt).pin_memory().to(device, at::kInt, /*non_blocking=*/true);
  return out;
}

}  // namespace

bool takes_flash_packed(const Tensor& q, const Tensor& v) {
  const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  return q.is_cuda() && half && q.numel() > 0 && v.size(2) > 0 && v.size(2) <= q.size(2) &&
         q.size(2) % 8 == 0 && q.size(2) <= 256;
}

Tensor flash_packed(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                    const FlashOptions& options) {
  const auto dense_rows = [](const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const int64_t width = v.size(2), pad = q.size(2) - width;  // the kernel wants one width
  const Tensor values = pad > 0 ? at::constant_pad_nd(v, {0, pad}) : dense_rows(v);
  const Lengths queries = lengths_of(cu_q, q.device());
  const Lengths keys = cu_k.is_same(cu_q) ? queries : lengths_of(cu_k, q.device());
  std::optional<int64_t> left, right;
  if (options.window > 0) left = options.window - 1, right = 0;
  const Tensor o = std::get<0>(at::_flash_attention_forward(
      dense_rows(q), dense_rows(k), values, queries.offsets, keys.offsets, queries.longest, keys.longest,
      /*dropout_p=*/0.0, options.causal, /*return_debug_mask=*/false, options.scale, left, right));
  return pad > 0 ? o.narrow(2, 0, width).contiguous() : o;
}

}  // namespace godwit::ops
