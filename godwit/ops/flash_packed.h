// LibTorch's flash attention over packed sequences of any lengths as one call, on a GPU in bf16 or fp16.
// Where a batch holds hundreds of short documents or pictures, a call each costs more than the work.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops {

// Whether there is such a kernel for queries and keys q [T, H, D] and values v [T, H, D'].
bool takes_flash_packed(const at::Tensor& q, const at::Tensor& v);

// causal: a sequence's last query sees its last key, so queries may come after cached keys. window > 0
// (causal only): a query sees that many keys, its own one included.
struct FlashOptions {
  double scale = 1;
  bool causal = true;
  int64_t window = 0;
};

// q [Tq, H, D], k [Tk, H, D], v [Tk, H, D'], D' at most D; cu_q, cu_k int64 [N+1] on the CPU. Returns
// [Tq, H, D'], differentiable. Sequences of no tokens are allowed.
at::Tensor flash_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& cu_q,
                        const at::Tensor& cu_k, const FlashOptions& options);

}  // namespace godwit::ops
