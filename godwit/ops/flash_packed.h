// LibTorch's flash attention over packed sequences of any lengths as one call, on a GPU in bf16 or fp16.
// Where a batch holds hundreds of short documents or pictures, a call each costs more than the work.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops {

// Whether there is such a kernel for queries and keys q [T, H, D] and values v [T, H, D'].
bool takes_flash_packed(const at::Tensor& q, const at::Tensor& v);

// q, k, v [T, H, D]; cu_seqlens int64 [N+1] on the CPU, for queries and keys alike. Returns [T, H, D],
// differentiable. Sequences of no tokens are allowed.
at::Tensor flash_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& cu_seqlens, bool causal, double scale);

}  // namespace godwit::ops
