// glu: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/glu_ref.h"

namespace godwit::ops {
namespace {

void check_arguments(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  check_float({"glu", "g", g}, g.dim());
  check_like({"glu", "u", u}, {"glu", "g", g});
  check_shape({"glu", "u", u}, g.sizes());
  TORCH_CHECK(beta_gate >= 0 && beta_up >= 0, "glu: beta_gate, beta_up: expected 0 (off) or positive, got ",
              beta_gate, ", ", beta_up);
}

Tensor glu_composite(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  check_arguments(g, u, beta_gate, beta_up);
  return ref::glu(g, u, beta_gate, beta_up);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("glu(Tensor g, Tensor u, float beta_gate, float beta_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("glu", glu_composite);
}

}  // namespace

Tensor glu(const Tensor& g, const Tensor& u, double beta_gate, double beta_up) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("godwit::glu", "").typed<decltype(glu_composite)>();
  return op.call(g, u, beta_gate, beta_up);
}

}  // namespace godwit::ops
