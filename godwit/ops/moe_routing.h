// The router and its statistics as a training step uses them: without the scores of all experts, [T, E],
// whose writing and reading costs as much as all else that the router does. What is wanted of them comes from
// the logits.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace godwit::ops {

// ops.h, moe_router: weights [T, k], experts [T, k], cutoff [T].
std::tuple<at::Tensor, at::Tensor, at::Tensor> moe_route(const at::Tensor& logits, const at::Tensor& bias,
                                                         int64_t k, bool renormalize, double scale,
                                                         int64_t groups, int64_t topk_groups);

// ops.h, qb_histogram, of scores sigmoid(logits).
void qb_histogram_of_logits(const at::Tensor& logits, const at::Tensor& cutoff, double range_min,
                            double range_max, at::Tensor& counts);

}  // namespace godwit::ops
