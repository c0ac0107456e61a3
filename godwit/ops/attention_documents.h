// Causal attention over packed documents of unlike lengths, of which some are long, on a GPU with values
// narrower than keys (MLA's 128 and 192). PyTorch's flash kernel pads the values and reaches 200 TFLOP/s
// there; cuDNN's, which scaled_dot_product_attention takes, 500 and more, but it makes a plan for every
// length that it meets, some 66 ms each. So a long document is filled up with zeros to the next of few
// lengths, which changes nothing before its end; runs of short ones are one call of the flash kernel.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops {

// cu int64 [N+1] on the CPU, of queries and keys alike.
bool takes_attention_by_documents(const at::Tensor& q, const at::Tensor& v, const at::Tensor& cu);

// q, k [T, H, D], v [T, H, D']; returns [T, H, D'], differentiable.
at::Tensor attention_by_documents(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& cu, double scale);

// The length that a document of so many tokens is filled up to: at most an eighth more, or 512 tokens.
int64_t planned_length(int64_t tokens);

}  // namespace godwit::ops
