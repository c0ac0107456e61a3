// qb_histogram: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
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

void histogram_composite(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                         Tensor& counts) {
  check_arguments(scores, cutoff, range_min, range_max, counts);
  const at::NoGradGuard no_grad;
  ref::qb_histogram(scores, cutoff, range_min, range_max, counts);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "qb_histogram(Tensor scores, Tensor cutoff, float range_min, float range_max, Tensor(a!) counts) -> "
      "()");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("qb_histogram", histogram_composite);
}

}  // namespace

void qb_histogram(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                  Tensor& counts) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("godwit::qb_histogram", "")
                             .typed<decltype(histogram_composite)>();
  op.call(scores, cutoff, range_min, range_max, counts);
}

}  // namespace godwit::ops
