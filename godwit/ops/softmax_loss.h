// Shared by the registrations of softmax_loss and scaled: the plain compositions.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace godwit::ops {

// Of logits [R, V] with targets int64 [R] (below 0: ignored) and weights [R]: nll [R] in the logits' type;
// d_logits [R, V], if there, becomes weight (softmax - one-hot).
at::Tensor softmax_loss_composition(const at::Tensor& logits, const at::Tensor& targets,
                                    const at::Tensor& weights, const std::optional<at::Tensor>& d_logits);

// x times a 0-dimensional tensor, rounded once to `type`.
at::Tensor scaled_composition(const at::Tensor& x, const at::Tensor& factor, at::ScalarType type);

}  // namespace godwit::ops
