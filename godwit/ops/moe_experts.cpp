// moe_experts: checks, autograd and dispatch. The backward needs G = W1 z and U = W3 z of every row; whether
// the forward keeps them or the backward computes them again: see keep_products.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "godwit/kernels/moe_experts.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "moe_experts";

void check_arguments(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                     const Tensor& w3, const Tensor& w2) {
  const Argument z_arg{kOp, "z", z};
  check_float(z_arg, 2);
  check_float({kOp, "w1", w1}, 3);
  const int64_t tokens = z.size(0), width = z.size(1), count = w1.size(0), inner = w1.size(1);
  check_shape({kOp, "w1", w1}, {count, inner, width});
  check_shape({kOp, "w3", w3}, {count, inner, width});
  check_shape({kOp, "w2", w2}, {count, width, inner});
  for (const Argument& w : {Argument{kOp, "w1", w1}, Argument{kOp, "w3", w3}, Argument{kOp, "w2", w2}}) {
    check_like(w, z_arg);
  }
  check_type({kOp, "experts", experts}, at::kInt);
  TORCH_CHECK(experts.dim() == 2 && experts.size(0) == tokens, kOp, ": experts: expected shape [", tokens,
              ", k], got ", experts.sizes());
  check_float({kOp, "weights", weights}, 2);
  check_shape({kOp, "weights", weights}, experts.sizes());
  check_device({kOp, "experts", experts}, z_arg);
  check_device({kOp, "weights", weights}, z_arg);
}

kernels::MoeShape shape_of(const Tensor& z, const Tensor& experts, const Tensor& w1, double beta_gate,
                           double beta_up) {
  return {.tokens = z.size(0),
          .k = experts.size(1),
          .experts = w1.size(0),
          .width = w1.size(2),
          .inner = w1.size(1),
          .form = {.beta_gate = static_cast<float>(beta_gate), .beta_up = static_cast<float>(beta_up)}};
}

kernels::MoePlan plan_of(const Tensor& experts, int64_t count) {
  kernels::MoePlan plan;
  const auto* choices = experts.const_data_ptr<int32_t>();
  const int64_t bad = kernels::make_moe_plan(choices, experts.numel(), count, &plan);
  TORCH_CHECK(bad < 0, kOp, ": experts: expected 0 to ", count - 1, ", got ", choices[bad], " for token ",
              bad / experts.size(1));
  return plan;
}

// The three weights as the kernels take them: contiguous, fp32 or bf16 as they are, other types as fp32.
struct Weights {
  Weights(const Tensor& a, const Tensor& b, const Tensor& c) {
    const auto taken = [](const Tensor& w) {
      return (w.scalar_type() == at::kBFloat16 ? w : w.to(at::kFloat)).contiguous();
    };
    w1 = taken(a), w3 = taken(b), w2 = taken(c);
  }
  [[nodiscard]] kernels::MoeWeights view() const {
    return {
        .w1 = w1.const_data_ptr(),
        .w3 = w3.const_data_ptr(),
        .w2 = w2.const_data_ptr(),
        .format = w1.scalar_type() == at::kBFloat16 ? kernels::MoeFormat::kBf16 : kernels::MoeFormat::kFp32};
  }
  Tensor w1, w3, w2;
};

std::tuple<Tensor, Tensor> fwd_cpu(const Tensor& z, const Tensor& experts, const Tensor& weights,
                                   const Tensor& w1, const Tensor& w3, const Tensor& w2, double beta_gate,
                                   double beta_up, bool keep) {
  if (z.scalar_type() == at::kDouble) {
    return {ref::moe_experts(z, experts, weights, w1, w3, w2, beta_gate, beta_up),
            at::empty({0}, z.options())};
  }
  const auto shape = shape_of(z, experts, w1, beta_gate, beta_up);
  const Tensor choices = experts.contiguous(), x = as_float(z), p = as_float(weights);
  const auto plan = plan_of(choices, shape.experts);
  const Weights w(w1, w3, w2);
  Tensor out = at::empty(x.sizes(), x.options());
  Tensor saved = keep ? at::empty({plan.rows, 2, kernels::moe_padded(shape.inner)}, x.options())
                      : at::empty({0}, x.options());
  kernels::moe_experts_fwd({.shape = shape,
                            .w = w.view(),
                            .z = x.const_data_ptr<float>(),
                            .weights = p.const_data_ptr<float>(),
                            .out = out.mutable_data_ptr<float>(),
                            .saved = keep ? saved.mutable_data_ptr<float>() : nullptr},
                           plan);
  return {out.to(z.scalar_type()), saved};
}

// Of z, weights, w1, w3, w2 in fp64, by autograd on the plain composition.
torch::autograd::variable_list plain_gradients(const Tensor& d_out, torch::autograd::variable_list leaves,
                                               const Tensor& experts, double beta_gate, double beta_up) {
  const at::AutoGradMode with_grad(true);
  for (Tensor& leaf : leaves) leaf = leaf.detach().requires_grad_(true);
  const Tensor out =
      ref::moe_experts(leaves[0], experts, leaves[1], leaves[2], leaves[3], leaves[4], beta_gate, beta_up);
  return torch::autograd::grad({out}, leaves, {d_out});
}

// wanted: gradients for z, weights, and w1, w3, w2 together.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd_cpu(const Tensor& d_out, const Tensor& saved,
                                                           const Tensor& z, const Tensor& experts,
                                                           const Tensor& weights, const Tensor& w1,
                                                           const Tensor& w3, const Tensor& w2,
                                                           double beta_gate, double beta_up,
                                                           std::array<bool, 3> wanted) {
  if (z.scalar_type() == at::kDouble) {
    const auto g = plain_gradients(d_out, {z, weights, w1, w3, w2}, experts, beta_gate, beta_up);
    const auto if_wanted = [&](size_t i, bool want) { return want ? g[i] : Tensor(); };
    return {if_wanted(0, wanted[0]), if_wanted(1, wanted[1]), if_wanted(2, wanted[2]),
            if_wanted(3, wanted[2]), if_wanted(4, wanted[2])};
  }
  const auto shape = shape_of(z, experts, w1, beta_gate, beta_up);
  const Tensor choices = experts.contiguous(), x = as_float(z), p = as_float(weights), d = as_float(d_out);
  const auto plan = plan_of(choices, shape.experts);
  const Weights w(w1, w3, w2);
  const auto result = [&](const Tensor& like, bool want) {
    return want ? at::empty(like.sizes(), x.options()) : Tensor();
  };
  const auto pointer = [](Tensor& t) { return t.defined() ? t.mutable_data_ptr<float>() : nullptr; };
  Tensor d_z = result(z, wanted[0]), d_weights = result(weights, wanted[1]);
  Tensor d_w1 = result(w1, wanted[2]), d_w3 = result(w3, wanted[2]), d_w2 = result(w2, wanted[2]);
  const bool kept = saved.size(0) == plan.rows && plan.rows > 0;
  kernels::moe_experts_bwd({.shape = shape,
                            .w = w.view(),
                            .z = x.const_data_ptr<float>(),
                            .weights = p.const_data_ptr<float>(),
                            .saved = kept ? saved.const_data_ptr<float>() : nullptr,
                            .d_out = d.const_data_ptr<float>(),
                            .d_z = pointer(d_z),
                            .d_weights = pointer(d_weights),
                            .d_w1 = pointer(d_w1),
                            .d_w3 = pointer(d_w3),
                            .d_w2 = pointer(d_w2)},
                           plan);
  const auto typed = [](const Tensor& t, const Tensor& like) {
    return t.defined() ? t.to(like.scalar_type()) : t;
  };
  return {typed(d_z, z), typed(d_weights, weights), typed(d_w1, w1), typed(d_w3, w3), typed(d_w2, w2)};
}

std::tuple<Tensor, Tensor> fwd_meta(const Tensor& z, const Tensor& /*experts*/, const Tensor& /*weights*/,
                                    const Tensor& /*w1*/, const Tensor& /*w3*/, const Tensor& /*w2*/,
                                    double /*beta_gate*/, double /*beta_up*/, bool keep) {
  TORCH_CHECK(!keep, kOp, ": what the forward keeps has no shape before it runs");
  return {meta_like(z), meta_tensor({0}, z, work_type(z))};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> bwd_meta(const Tensor& /*d_out*/, const Tensor& /*saved*/,
                                                            const Tensor& z, const Tensor& /*experts*/,
                                                            const Tensor& weights, const Tensor& w1,
                                                            const Tensor& w3, const Tensor& w2,
                                                            double /*beta_gate*/, double /*beta_up*/,
                                                            std::array<bool, 3> wanted) {
  return {meta_gradient(z, wanted[0]), meta_gradient(weights, wanted[1]), meta_gradient(w1, wanted[2]),
          meta_gradient(w3, wanted[2]), meta_gradient(w2, wanted[2])};
}

using Fwd = decltype(fwd_cpu);
using Bwd = decltype(bwd_cpu);

// Keeping the products costs 8 I bytes a row on the CPU and 4 on a GPU (bf16) and saves a tenth of the time
// of forward and backward together; beyond this size the memory is worth more.
bool keep_products(const Tensor& experts, const Tensor& w1) {
  if (is_observed(experts)) return false;
  const int64_t inner = kernels::moe_padded(w1.size(1)), rows = experts.numel();
  return experts.is_cuda() ? rows * inner * 4 <= int64_t{2} << 30 : rows * inner * 8 <= int64_t{256} << 20;
}

class Experts : public torch::autograd::Function<Experts> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& z, const Tensor& experts,
                        const Tensor& weights, const Tensor& w1, const Tensor& w3, const Tensor& w2,
                        double beta_gate, double beta_up) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::moe_experts_fwd");
    const auto [out, saved] =
        op.call(z, experts, weights, w1, w3, w2, beta_gate, beta_up, keep_products(experts, w1));
    ctx->save_for_backward({saved, z, experts, weights, w1, w3, w2});
    ctx->saved_data["beta_gate"] = beta_gate;
    ctx->saved_data["beta_up"] = beta_up;
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::moe_experts_bwd");
    const auto s = ctx->get_saved_variables();
    const bool weights_too = ctx->needs_input_grad(3) || ctx->needs_input_grad(4) || ctx->needs_input_grad(5);
    const auto [d_z, d_weights, d_w1, d_w3, d_w2] =
        op.call(grads[0], s[0], s[1], s[2], s[3], s[4], s[5], s[6], ctx->saved_data["beta_gate"].toDouble(),
                ctx->saved_data["beta_up"].toDouble(),
                {ctx->needs_input_grad(0), ctx->needs_input_grad(2), weights_too});
    return {d_z, Tensor(), d_weights, d_w1, d_w3, d_w2, Tensor(), Tensor()};
  }
};

Tensor experts_composite(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                         const Tensor& w3, const Tensor& w2, double beta_gate, double beta_up) {
  if (!is_dataless(z)) check_arguments(z, experts, weights, w1, w3, w2);
  static const auto op = typed_op<Fwd>("godwit::moe_experts_fwd");
  if (!has_kernel(op, z) && !is_observed(z))
    return ref::moe_experts(z, experts, weights, w1, w3, w2, beta_gate, beta_up);
  if (needs_grad(z, weights, w1, w3, w2)) {
    return Experts::apply(z, experts, weights, w1, w3, w2, beta_gate, beta_up);
  }
  return std::get<0>(op.call(z, experts, weights, w1, w3, w2, beta_gate, beta_up, /*keep=*/false));
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "moe_experts(Tensor z, Tensor experts, Tensor weights, Tensor w1, Tensor w3, Tensor w2, float "
      "beta_gate, "
      "float beta_up) -> Tensor");
  m.def(
      "moe_experts_fwd(Tensor z, Tensor experts, Tensor weights, Tensor w1, Tensor w3, Tensor w2, float "
      "beta_gate, "
      "float beta_up, bool keep) -> (Tensor out, Tensor saved)");
  m.def(
      "moe_experts_bwd(Tensor d_out, Tensor saved, Tensor z, Tensor experts, Tensor weights, Tensor w1, "
      "Tensor w3, "
      "Tensor w2, float beta_gate, float beta_up, bool[3] wanted) -> (Tensor d_z, Tensor d_weights, Tensor "
      "d_w1, "
      "Tensor d_w3, Tensor d_w2)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("moe_experts", experts_composite);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("moe_experts_fwd", fwd_cpu);
  m.impl("moe_experts_bwd", bwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("moe_experts_fwd", fwd_meta);
  m.impl("moe_experts_bwd", bwd_meta);
}

}  // namespace

Tensor moe_experts(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                   const Tensor& w3, const Tensor& w2, double beta_gate, double beta_up) {
  static const auto op = typed_op<decltype(experts_composite)>("godwit::moe_experts");
  return op.call(z, experts, weights, w1, w3, w2, beta_gate, beta_up);
}

}  // namespace godwit::ops
