// Plain composition of qb_histogram, in place on `counts`. Any device.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops::ref {

void qb_histogram(const at::Tensor& scores, const at::Tensor& cutoff, double range_min, double range_max,
                  at::Tensor& counts);

}  // namespace godwit::ops::ref
