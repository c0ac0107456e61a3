#include "godwit/ops/ref/qb_histogram_ref.h"

#include <ATen/ATen.h>

namespace godwit::ops::ref {

void qb_histogram(const at::Tensor& scores, const at::Tensor& cutoff, double range_min, double range_max,
                  at::Tensor& counts) {
  const int64_t bins = counts.size(1), experts = counts.size(0);
  const double per_unit = static_cast<double>(bins) / (range_max - range_min);
  const at::Tensor position_TE = (cutoff.unsqueeze(1) - scores - range_min) * per_unit;
  const at::Tensor bin_TE = position_TE.floor().clamp(0, static_cast<double>(bins - 1)).to(at::kLong);
  const at::Tensor cell_TE = bin_TE + at::arange(experts, bin_TE.options()) * bins;
  counts.add_(at::bincount(cell_TE.reshape({-1}), {}, experts * bins).view({experts, bins}));
}

}  // namespace godwit::ops::ref
