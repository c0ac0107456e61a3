// moe_experts_quantized: the forward of moe_experts with int8 or MXFP4 weights. On the CPU the kernels of
// moe_experts, which read the packed weights as fp32 in registers; elsewhere the plain composition on
// unpacked ones.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/kernels/moe_experts.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "godwit/ops/ref/quantized_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "moe_experts_quantized";

// A matrix of each expert, [E, rows, cols] in values, and its scales.
void check_matrix(const Argument& w, const Argument& s, const Argument& z, at::IntArrayRef sizes) {
  const int64_t count = sizes[0], rows = sizes[1], cols = sizes[2];
  if (w.tensor.scalar_type() == at::kChar) {
    check_shape(w, {count, rows, cols});
    check_shape(s, {count, rows});
    check_type(s, at::kFloat);
  } else {
    check_type(w, at::kByte);
    TORCH_CHECK(cols % 32 == 0, kOp, ": ", w.name, ": MXFP4 expects a width that is a multiple of 32, got ",
                cols);
    check_shape(w, {count, rows, cols / 2});
    check_shape(s, {count, rows, cols / 32});
    check_type(s, at::kByte);
  }
  check_device(w, z);
  check_device(s, z);
}

// Returns the inner width.
int64_t check_arguments(const Tensor& z, const Tensor& experts, const Tensor& weights,
                        const QuantizedExperts& w) {
  const Argument z_arg{kOp, "z", z};
  check_float(z_arg, 2);
  TORCH_CHECK(w.w1.dim() == 3, kOp, ": w1: expected 3 dimensions, got shape ", w.w1.sizes());
  const int64_t width = z.size(1), count = w.w1.size(0), inner = w.w1.size(1);
  check_type({kOp, "w3", w.w3}, w.w1.scalar_type());
  check_type({kOp, "w2", w.w2}, w.w1.scalar_type());
  check_matrix({kOp, "w1", w.w1}, {kOp, "s1", w.s1}, z_arg, {count, inner, width});
  check_matrix({kOp, "w3", w.w3}, {kOp, "s3", w.s3}, z_arg, {count, inner, width});
  check_matrix({kOp, "w2", w.w2}, {kOp, "s2", w.s2}, z_arg, {count, width, inner});
  check_type({kOp, "experts", experts}, at::kInt);
  TORCH_CHECK(experts.dim() == 2 && experts.size(0) == z.size(0), kOp, ": experts: expected shape [",
              z.size(0), ", k], got ", experts.sizes());
  check_float({kOp, "weights", weights}, 2);
  check_shape({kOp, "weights", weights}, experts.sizes());
  check_device({kOp, "experts", experts}, z_arg);
  check_device({kOp, "weights", weights}, z_arg);
  TORCH_CHECK(!needs_grad(z, weights), kOp,
              ": has no gradient; call it without grad mode, or train with moe_experts");
  return inner;
}

Tensor fwd(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1, const Tensor& s1,
           const Tensor& w3, const Tensor& s3, const Tensor& w2, const Tensor& s2, double beta_gate,
           double beta_up) {
  const int64_t inner = check_arguments(z, experts, weights, {w1, s1, w3, s3, w2, s2});
  const at::NoGradGuard no_grad;
  if (!z.is_cpu() || z.scalar_type() == at::kDouble) {
    const auto plain = [&](const Tensor& w, const Tensor& s) {
      return ref::dequantize(w, s).to(z.scalar_type());
    };
    return ref::moe_experts(z, experts, weights, plain(w1, s1), plain(w3, s3), plain(w2, s2), beta_gate,
                            beta_up);
  }
  const Tensor choices = experts.contiguous(), x = as_float(z), p = as_float(weights);
  const Tensor packed[] = {w1.contiguous(), w3.contiguous(), w2.contiguous()};
  const Tensor scales[] = {s1.contiguous(), s3.contiguous(), s2.contiguous()};
  kernels::MoePlan plan;
  const auto* chosen = choices.const_data_ptr<int32_t>();
  const int64_t bad = kernels::make_moe_plan(chosen, choices.numel(), w1.size(0), &plan);
  TORCH_CHECK(bad < 0, kOp, ": experts: expected 0 to ", w1.size(0) - 1, ", got ", chosen[bad], " for token ",
              bad / choices.size(1));
  const bool int8 = w1.scalar_type() == at::kChar;
  Tensor out = at::empty(x.sizes(), x.options());
  kernels::moe_experts_fwd({.shape = {.tokens = z.size(0),
                                      .k = experts.size(1),
                                      .experts = w1.size(0),
                                      .width = z.size(1),
                                      .inner = inner,
                                      .form = {.beta_gate = static_cast<float>(beta_gate),
                                               .beta_up = static_cast<float>(beta_up)}},
                            .w = {.w1 = packed[0].const_data_ptr(),
                                  .w3 = packed[1].const_data_ptr(),
                                  .w2 = packed[2].const_data_ptr(),
                                  .s1 = scales[0].const_data_ptr(),
                                  .s3 = scales[1].const_data_ptr(),
                                  .s2 = scales[2].const_data_ptr(),
                                  .format = int8 ? kernels::MoeFormat::kInt8 : kernels::MoeFormat::kMxfp4},
                            .z = x.const_data_ptr<float>(),
                            .weights = p.const_data_ptr<float>(),
                            .out = out.mutable_data_ptr<float>()},
                           plan);
  return out.to(z.scalar_type());
}

Tensor fwd_meta(const Tensor& z, const Tensor& /*experts*/, const Tensor& /*weights*/, const Tensor& /*w1*/,
                const Tensor& /*s1*/, const Tensor& /*w3*/, const Tensor& /*s3*/, const Tensor& /*w2*/,
                const Tensor& /*s2*/, double /*beta_gate*/, double /*beta_up*/) {
  return meta_like(z);
}

Tensor quantized_composite(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                           const Tensor& s1, const Tensor& w3, const Tensor& s3, const Tensor& w2,
                           const Tensor& s2, double beta_gate, double beta_up) {
  if (!is_dataless(z)) check_arguments(z, experts, weights, {w1, s1, w3, s3, w2, s2});
  static const auto op = typed_op<decltype(fwd)>("godwit::moe_experts_quantized_fwd");
  return op.call(z, experts, weights, w1, s1, w3, s3, w2, s2, beta_gate, beta_up);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "moe_experts_quantized_fwd(Tensor z, Tensor experts, Tensor weights, Tensor w1, Tensor s1, Tensor w3, "
      "Tensor s3, "
      "Tensor w2, Tensor s2, float beta_gate, float beta_up) -> Tensor");
  m.def(
      "moe_experts_quantized(Tensor z, Tensor experts, Tensor weights, Tensor w1, Tensor s1, Tensor w3, "
      "Tensor s3, "
      "Tensor w2, Tensor s2, float beta_gate, float beta_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("moe_experts_quantized", quantized_composite);
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("moe_experts_quantized_fwd", fwd);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("moe_experts_quantized_fwd", fwd_meta);
}

}  // namespace

Tensor moe_experts_quantized(const Tensor& z, const Tensor& experts, const Tensor& weights,
                             const QuantizedExperts& w, double beta_gate, double beta_up) {
  static const auto op = typed_op<decltype(quantized_composite)>("godwit::moe_experts_quantized");
  return op.call(z, experts, weights, w.w1, w.s1, w.w3, w.s3, w.w2, w.s2, beta_gate, beta_up);
}

}  // namespace godwit::ops
