// attn_res_mix: checks and dispatch.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/ops/arguments.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/attn_res_mix_ref.h"

namespace godwit::ops {
namespace {

void check_arguments(at::TensorList sources, const Tensor& norm_weight, const Tensor& query) {
  TORCH_CHECK(!sources.empty(), "attn_res_mix: sources: expected at least one tensor, got none");
  const Tensor& first = sources[0];
  check_float({"attn_res_mix", "sources[0]", first}, 2);
  for (const Tensor& source : sources) {
    check_like({"attn_res_mix", "sources", source}, {"attn_res_mix", "sources[0]", first});
    check_shape({"attn_res_mix", "sources", source}, first.sizes());
  }
  for (const Argument& vector :
       {Argument{"attn_res_mix", "norm_weight", norm_weight}, Argument{"attn_res_mix", "query", query}}) {
    check_float(vector, 1);
    check_shape(vector, {first.size(1)});
    check_device(vector, {"attn_res_mix", "sources[0]", first});
  }
}

Tensor mix_composite(at::TensorList sources, const Tensor& norm_weight, const Tensor& query, double eps) {
  check_arguments(sources, norm_weight, query);
  return ref::attn_res_mix(sources, norm_weight, query, eps);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("attn_res_mix(Tensor[] sources, Tensor norm_weight, Tensor query, float eps) -> Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("attn_res_mix", mix_composite);
}

}  // namespace

Tensor attn_res_mix(const std::vector<Tensor>& sources, const Tensor& norm_weight, const Tensor& query,
                    double eps) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("godwit::attn_res_mix", "")
                             .typed<decltype(mix_composite)>();
  return op.call(sources, norm_weight, query, eps);
}

}  // namespace godwit::ops
