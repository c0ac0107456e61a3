// Shared by the registrations of softmax_loss: the plain composition.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace godwit::ops {

// Of logits [R, V] with targets int64 [R] (below 0: ignored) and weights [R]: nll [R] in the logits' type,
// and weight (softmax - one-hot) [R, V] in `type`, undefined unless wanted.
std::tuple<at::Tensor, at::Tensor> softmax_loss_composition(const at::Tensor& logits,
                                                            const at::Tensor& targets,
                                                            const at::Tensor& weights, bool gradient,
                                                            at::ScalarType type);

}  // namespace godwit::ops
