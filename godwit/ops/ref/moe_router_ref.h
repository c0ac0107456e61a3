// Plain composition of moe_router. Any device, fp32 or fp64 logits; weights are differentiable in the logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace godwit::ops::ref {

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> moe_router(const at::Tensor& logits,
                                                                      const at::Tensor& bias, int64_t k,
                                                                      bool renormalize, double scale,
                                                                      int64_t groups, int64_t topk_groups);

}  // namespace godwit::ops::ref
