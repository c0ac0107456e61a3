#include "godwit/ops/flash_packed.h"

#include <ATen/ATen.h>
#include <ATen/ops/_flash_attention_forward.h>

#include <algorithm>

namespace godwit::ops {

bool takes_flash_packed(const at::Tensor& q, const at::Tensor& v) {
  const bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  return q.is_cuda() && half && q.size(0) > 0 && q.size(1) > 0 && q.size(2) == v.size(2) &&
         q.size(2) % 8 == 0 && q.size(2) > 0 && q.size(2) <= 256;
}

at::Tensor flash_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& cu_seqlens, bool causal, double scale) {
  const auto dense_rows = [](const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const at::Tensor offsets = cu_seqlens.contiguous();
  const auto* at = offsets.const_data_ptr<int64_t>();
  int64_t longest = 0;
  for (int64_t n = 0; n + 1 < offsets.numel(); ++n) longest = std::max(longest, at[n + 1] - at[n]);
  const at::Tensor on_device =
      offsets.to(at::kInt).pin_memory().to(q.device(), at::kInt, /*non_blocking=*/true);
  return std::get<0>(at::_flash_attention_forward(dense_rows(q), dense_rows(k), dense_rows(v), on_device,
                                                  on_device, longest, longest, /*dropout_p=*/0.0, causal,
                                                  /*return_debug_mask=*/false, scale));
}

}  // namespace godwit::ops
