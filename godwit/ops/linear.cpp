// linear: y = x weight^T. On the CPU in fp32 by our own GEMM, whose rows do not depend on one another bit for
// bit and which is faster than the wheel's (see docs/moe.md, "Dense products"); elsewhere at::linear.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "godwit/kernels/gemm.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/quantized_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "linear";

void check_arguments(const Tensor& x, const Tensor& weight) {
  if (is_dataless(x)) return;
  check_float({kOp, "x", x}, x.dim());
  check_float({kOp, "weight", weight}, 2);
  check_like({kOp, "weight", weight}, {kOp, "x", x});
  TORCH_CHECK(x.dim() >= 1 && x.size(-1) == weight.size(1), kOp, ": x: expected last dimension ",
              weight.size(1), " (weight ", weight.sizes(), "), got shape ", x.sizes());
}

// As rows [M, K] with unit stride inside a row; a view where possible.
Tensor as_rows(const Tensor& x) {
  const Tensor rows = x.reshape({-1, x.size(-1)});
  return rows.stride(1) == 1 || rows.size(1) == 1 ? rows : rows.contiguous();
}

kernels::GemmOperand operand(const Tensor& rows, bool transposed) {
  return {.data = rows.const_data_ptr<float>(), .stride = rows.stride(0), .transposed = transposed};
}

// op(a) op(b), [m, n]
Tensor product(const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed) {
  const int64_t m = a.size(a_transposed ? 1 : 0), depth = a.size(a_transposed ? 0 : 1);
  const int64_t n = b.size(b_transposed ? 0 : 1);
  Tensor c = at::empty({m, n}, a.options());
  kernels::gemm({.m = m,
                 .n = n,
                 .depth = depth,
                 .a = operand(a, a_transposed),
                 .b = operand(b, b_transposed),
                 .c = c.mutable_data_ptr<float>(),
                 .c_stride = n});
  return c;
}

std::vector<int64_t> output_sizes(const Tensor& x, const Tensor& weight) {
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return sizes;
}

Tensor fwd_cpu(const Tensor& x, const Tensor& weight) {
  return product(as_rows(x), false, as_rows(weight), true).view(output_sizes(x, weight));
}

std::tuple<Tensor, Tensor> bwd_cpu(const Tensor& d_out, const Tensor& x, const Tensor& weight,
                                   std::array<bool, 2> wanted) {
  const Tensor d = as_rows(d_out);
  return {wanted[0] ? product(d, false, as_rows(weight), false).view(x.sizes()) : Tensor(),
          wanted[1] ? product(d, true, as_rows(x), false) : Tensor()};
}

Tensor fwd_meta(const Tensor& x, const Tensor& weight) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return meta_tensor(sizes, x);
}

Tensor int8_meta(const Tensor& x, const Tensor& values, const Tensor& /*scale*/) {
  return fwd_meta(x, values);
}

std::tuple<Tensor, Tensor> bwd_meta(const Tensor& /*d_out*/, const Tensor& x, const Tensor& weight,
                                    std::array<bool, 2> wanted) {
  return {meta_gradient(x, wanted[0]), meta_gradient(weight, wanted[1])};
}

Tensor heads_meta(const Tensor& x, const Tensor& weight) {
  return at::empty({x.size(0), x.size(1), weight.size(1)}, x.options());
}

// One product a head, straight from and into the strided rows.
Tensor heads_cpu(const Tensor& x_in, const Tensor& weight_in) {
  const Tensor x = x_in.stride(2) == 1 ? x_in : x_in.contiguous();
  const bool usable = weight_in.stride(2) == 1 || weight_in.stride(1) == 1;
  const Tensor weight = usable ? weight_in : weight_in.contiguous();
  const bool rows = weight.stride(2) == 1;  // else a transposed view
  Tensor y = heads_meta(x, weight);
  for (int64_t h = 0; h < x.size(1); ++h) {
    kernels::gemm({.m = x.size(0),
                   .n = weight.size(1),
                   .depth = weight.size(2),
                   .a = {.data = x.const_data_ptr<float>() + h * x.stride(1), .stride = x.stride(0)},
                   .b = {.data = weight.const_data_ptr<float>() + h * weight.stride(0),
                         .stride = rows ? weight.stride(1) : weight.stride(2),
                         .transposed = rows},
                   .c = y.mutable_data_ptr<float>() + h * weight.size(1),
                   .c_stride = y.stride(0)});
  }
  return y;
}

using Fwd = decltype(fwd_cpu);
using Bwd = decltype(bwd_cpu);

class Linear : public torch::autograd::Function<Linear> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, const Tensor& weight) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<Fwd>("godwit::linear_fwd");
    ctx->save_for_backward({x, weight});
    return op.call(x, weight);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    static const auto op = typed_op<Bwd>("godwit::linear_bwd");
    const auto saved = ctx->get_saved_variables();
    const auto [d_x, d_weight] =
        op.call(grads[0], saved[0], saved[1], {ctx->needs_input_grad(0), ctx->needs_input_grad(1)});
    return {d_x, d_weight};
  }
};

Tensor linear_composite(const Tensor& x, const Tensor& weight) {
  check_arguments(x, weight);
  static const auto op = typed_op<Fwd>("godwit::linear_fwd");
  if (x.scalar_type() != at::kFloat || !has_kernel(op, x)) return at::linear(x, weight);
  return needs_grad(x, weight) ? Linear::apply(x, weight) : op.call(x, weight);
}

std::tuple<Tensor, Tensor> quantize_int8_composite(const Tensor& w) {
  check_float({"quantize_int8", "w", w}, w.dim());
  TORCH_CHECK(w.dim() >= 1, "quantize_int8: w: expected at least one dimension");
  const at::NoGradGuard no_grad;
  const Tensor rows = w.to(at::kFloat), scale = rows.abs().amax(-1) / 127;
  const Tensor divisor = scale.masked_fill(scale.eq(0), 1).unsqueeze(-1);
  return {(rows / divisor).round().clamp(-127, 127).to(at::kChar), scale};
}

void check_int8(const Tensor& x, const Tensor& values, const Tensor& scale) {
  constexpr const char* op = "linear_int8";
  const Argument x_arg{op, "x", x};
  check_float(x_arg, x.dim());
  check_type({op, "values", values}, at::kChar);
  check_type({op, "scale", scale}, at::kFloat);
  TORCH_CHECK(values.dim() == 2 && x.dim() >= 1 && x.size(-1) == values.size(1), op,
              ": x: expected the last dimension of values ", values.sizes(), ", got shape ", x.sizes());
  check_shape({op, "scale", scale}, {values.size(0)});
  check_device({op, "values", values}, x_arg);
  check_device({op, "scale", scale}, x_arg);
}

Tensor int8_fwd(const Tensor& x, const Tensor& values, const Tensor& scale) {
  const at::NoGradGuard no_grad;
  if (!x.is_cpu() || x.scalar_type() == at::kDouble) {
    return at::linear(x, ref::dequantize_int8(values, scale).to(x.scalar_type()));
  }
  const Tensor rows = as_rows(x.to(at::kFloat)), b = values.contiguous(), scales = scale.contiguous();
  Tensor c = at::empty({rows.size(0), b.size(0)}, rows.options());
  kernels::gemm({.m = rows.size(0),
                 .n = b.size(0),
                 .depth = b.size(1),
                 .a = operand(rows, false),
                 .b = {.data = nullptr, .stride = b.size(1), .transposed = true},
                 .b_int8 = b.const_data_ptr<int8_t>(),
                 .b_scale = scales.const_data_ptr<float>(),
                 .c = c.mutable_data_ptr<float>(),
                 .c_stride = b.size(0)});
  return c.view(output_sizes(x, values)).to(x.scalar_type());
}

Tensor heads_composite(const Tensor& x, const Tensor& weight) {
  check_float({kOp, "x", x}, 3);
  check_float({kOp, "weight", weight}, 3);
  check_like({kOp, "weight", weight}, {kOp, "x", x});
  check_shape({kOp, "weight", weight}, {x.size(1), weight.size(1), x.size(2)});
  static const auto op = typed_op<Fwd>("godwit::linear_heads_fwd");
  if (x.scalar_type() == at::kFloat && has_kernel(op, x) && !needs_grad(x, weight)) return op.call(x, weight);
  return at::bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1);
}

Tensor linear_int8_composite(const Tensor& x, const Tensor& values, const Tensor& scale) {
  if (!is_dataless(x)) check_int8(x, values, scale);
  TORCH_CHECK(!needs_grad(x),
              "linear_int8: has no gradient; call it without grad mode, or train with linear");
  static const auto op = typed_op<decltype(int8_fwd)>("godwit::linear_int8_fwd");
  return op.call(x, values, scale);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("quantize_int8(Tensor w) -> (Tensor values, Tensor scale)");
  m.def("linear_int8(Tensor x, Tensor values, Tensor scale) -> Tensor");
  m.def("linear_int8_fwd(Tensor x, Tensor values, Tensor scale) -> Tensor");
  m.def("linear(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_heads(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_heads_fwd(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_fwd(Tensor x, Tensor weight) -> Tensor");
  m.def("linear_bwd(Tensor d_out, Tensor x, Tensor weight, bool[2] wanted) -> (Tensor d_x, Tensor d_weight)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("linear", linear_composite);
  m.impl("quantize_int8", quantize_int8_composite);
  m.impl("linear_int8", linear_int8_composite);
  m.impl("linear_heads", heads_composite);
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("linear_int8_fwd", int8_fwd);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("linear_fwd", fwd_cpu);
  m.impl("linear_heads_fwd", heads_cpu);
  m.impl("linear_bwd", bwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("linear_fwd", fwd_meta);
  m.impl("linear_heads_fwd", heads_meta);
  m.impl("linear_int8_fwd", int8_meta);
  m.impl("linear_bwd", bwd_meta);
}

}  // namespace

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& w) {
  static const auto op = typed_op<decltype(quantize_int8_composite)>("godwit::quantize_int8");
  return op.call(w);
}

Tensor linear_int8(const Tensor& x, const Tensor& values, const Tensor& scale) {
  static const auto op = typed_op<decltype(linear_int8_composite)>("godwit::linear_int8");
  return op.call(x, values, scale);
}

Tensor linear(const Tensor& x, const Tensor& weight) {
  static const auto op = typed_op<decltype(linear_composite)>("godwit::linear");
  return op.call(x, weight);
}

Tensor linear_heads(const Tensor& x, const Tensor& weight) {
  static const auto op = typed_op<decltype(heads_composite)>("godwit::linear_heads");
  return op.call(x, weight);
}

}  // namespace godwit::ops
