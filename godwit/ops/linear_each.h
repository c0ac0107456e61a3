// The products of one input with several matrices.
#pragma once

#include <vector>

#include "godwit/ops/matrix.h"

namespace godwit::ops {

// linear(x, w) of each w, all in one form. On a GPU those of a few bf16 rows without gradients are one
// launch.
std::vector<Tensor> linear_each(const Tensor& x, const std::vector<const Matrix*>& weights);

}  // namespace godwit::ops
