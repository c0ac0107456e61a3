// Muon's elementwise passes: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/muon_ref.h"

namespace godwit::ops {
namespace {

using Momentum = void(Tensor&, const Tensor&, Tensor&, double, double, bool);
using Weight = void(Tensor&, const Tensor&, const std::optional<Tensor>&, double, double);

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "muon_momentum_(Tensor(a!) momentum, Tensor grad, Tensor(b!) update, float grad_scale, float mu, bool "
      "nesterov) -> ()");
  m.def("mirror_lower_(Tensor(a!) batch, int block) -> ()");
  m.def("muon_weight_(Tensor(a!) weight, Tensor update, Tensor(b!)? copy, float keep, float rate) -> ()");
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("muon_momentum_", ref::muon_momentum_);
  m.impl("muon_weight_", ref::muon_weight_);
  m.impl("mirror_lower_", ref::mirror_lower_);
}

void momentum_meta(Tensor& /*momentum*/, const Tensor& /*grad*/, Tensor& /*update*/, double /*grad_scale*/,
                   double /*mu*/, bool /*nesterov*/) {}
void weight_meta(Tensor& /*weight*/, const Tensor& /*update*/, const std::optional<Tensor>& /*copy*/,
                 double /*keep*/, double /*rate*/) {}
void mirror_meta(Tensor& /*batch*/, int64_t /*block*/) {}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("mirror_lower_", mirror_meta);
  m.impl("muon_momentum_", momentum_meta);
  m.impl("muon_weight_", weight_meta);
}

}  // namespace

void muon_momentum_(Tensor& momentum, const Tensor& grad, Tensor& update, double grad_scale, double mu,
                    bool nesterov) {
  static const auto op = typed_op<Momentum>("godwit::muon_momentum_");
  check_shape({"muon_momentum_", "grad", grad}, momentum.sizes());
  check_shape({"muon_momentum_", "update", update}, momentum.sizes());
  op.call(momentum, grad, update, grad_scale, mu, nesterov);
}

void muon_weight_(Tensor& weight, const Tensor& update, const std::optional<Tensor>& copy, double keep,
                  double rate) {
  static const auto op = typed_op<Weight>("godwit::muon_weight_");
  check_shape({"muon_weight_", "update", update}, weight.sizes());
  if (copy) check_shape({"muon_weight_", "copy", *copy}, weight.sizes());
  op.call(weight, update, copy, keep, rate);
}

}  // namespace godwit::ops
