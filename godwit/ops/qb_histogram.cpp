// qb_histogram: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>

#include "godwit/kernels/qb_histogram.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/moe_routing.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/qb_histogram_ref.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "qb_histogram";

void check_arguments(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                     const Tensor& counts) {
  const Argument scores_arg{kOp, "scores", scores};
  check_float(scores_arg, 2);
  check_like({kOp, "cutoff", cutoff}, scores_arg);
  check_shape({kOp, "cutoff", cutoff}, {scores.size(0)});
  check_type({kOp, "counts", counts}, at::kLong);
  TORCH_CHECK(counts.dim() == 2 && counts.size(0) == scores.size(1) && counts.size(1) > 0, kOp,
              ": counts: expected shape [", scores.size(1), ", bins], got ", counts.sizes());
  check_device({kOp, "counts", counts}, scores_arg);
  TORCH_CHECK(range_min < range_max, kOp, ": range: expected range_min < range_max, got ", range_min, ", ",
              range_max);
}

void histogram_other(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                     Tensor& counts, bool from_logits) {
  ref::qb_histogram(from_logits ? scores.sigmoid() : scores, cutoff, range_min, range_max, counts);
}

void histogram_cpu(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                   Tensor& counts, bool from_logits) {
  if (scores.scalar_type() == at::kDouble || !counts.is_contiguous()) {
    return histogram_other(scores, cutoff, range_min, range_max, counts, from_logits);
  }
  const Tensor s = as_float(scores), c = as_float(cutoff);
  kernels::qb_histogram({.tokens = s.size(0),
                         .experts = s.size(1),
                         .bins = counts.size(1),
                         .range_min = static_cast<float>(range_min),
                         .bins_per_unit = static_cast<float>(counts.size(1) / (range_max - range_min)),
                         .scores = s.const_data_ptr<float>(),
                         .from_logits = from_logits,
                         .cutoff = c.const_data_ptr<float>(),
                         .counts = counts.mutable_data_ptr<int64_t>()});
}

void histogram_meta(const Tensor& /*scores*/, const Tensor& /*cutoff*/, double /*range_min*/,
                    double /*range_max*/, Tensor& /*counts*/, bool /*from_logits*/) {}

void histogram_checked(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                       Tensor& counts, bool from_logits) {
  check_arguments(scores, cutoff, range_min, range_max, counts);
  static const auto op = typed_op<decltype(histogram_cpu)>("godwit::qb_histogram_fwd");
  op.call(scores, cutoff, range_min, range_max, counts, from_logits);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  for (const char* name : {"qb_histogram", "qb_histogram_fwd"}) {
    m.def((std::string(name) +
           "(Tensor scores, Tensor cutoff, float range_min, float range_max, Tensor(a!) counts, bool "
           "from_logits=False) -> ()")
              .c_str());
  }
}
// Below autograd: nothing here has a gradient.
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("qb_histogram", histogram_checked);
  m.impl("qb_histogram_fwd", histogram_other);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("qb_histogram_fwd", histogram_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("qb_histogram_fwd", histogram_meta);
}

void call(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max, Tensor& counts,
          bool from_logits) {
  static const auto op = typed_op<decltype(histogram_cpu)>("godwit::qb_histogram");
  op.call(scores, cutoff, range_min, range_max, counts, from_logits);
}

}  // namespace

void qb_histogram(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                  Tensor& counts) {
  call(scores, cutoff, range_min, range_max, counts, /*from_logits=*/false);
}

void qb_histogram_of_logits(const Tensor& logits, const Tensor& cutoff, double range_min, double range_max,
                            Tensor& counts) {
  call(logits, cutoff, range_min, range_max, counts, /*from_logits=*/true);
}

}  // namespace godwit::ops
