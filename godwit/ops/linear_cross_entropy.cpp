// linear_cross_entropy: the logits of a few rows at a time. Where a gradient is wanted, the forward also
// takes the gradients of x and head from the same logits (they are proportional to the gradient of the scalar
// loss, so the backward is one multiplication): the logits are computed once and never all held.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

#include "godwit/kernels/gemm.h"
#include "godwit/kernels/softmax_loss.h"
#include "godwit/ops/arguments.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/softmax_loss.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "linear_cross_entropy";
constexpr int64_t kIgnored = -100;

void check_arguments(const Tensor& x, const Tensor& head, const Tensor& targets, const Tensor& weights) {
  const Argument x_arg{kOp, "x", x};
  check_float(x_arg, 2);
  check_float({kOp, "head", head}, 2);
  check_like({kOp, "head", head}, x_arg);
  check_shape({kOp, "head", head}, {head.size(0), x.size(1)});
  check_type({kOp, "targets", targets}, at::kLong);
  check_shape({kOp, "targets", targets}, {x.size(0)});
  check_device({kOp, "targets", targets}, x_arg);
  check_float({kOp, "weights", weights}, 1);
  check_shape({kOp, "weights", weights}, {x.size(0)});
  check_device({kOp, "weights", weights}, x_arg);
  if (targets.is_cpu() && targets.numel() > 0) {
    const Tensor bad = targets.ne(kIgnored).logical_and(targets.lt(0).logical_or(targets.ge(head.size(0))));
    TORCH_CHECK(!bad.any().item<bool>(), kOp, ": targets: expected ", kIgnored, " or 0 to ", head.size(0) - 1,
                ", got ", targets.index({bad})[0].item<int64_t>());
  }
}

// Rows of logits held at once: about 32 M values on the CPU; on a GPU up to 400 M, in equal pieces.
int64_t chunk_rows(const Tensor& x, int64_t vocabulary) {
  const auto most = [&](int64_t values) { return values / std::max<int64_t>(1, vocabulary); };
  if (x.is_cpu()) return std::clamp<int64_t>(most(int64_t{1} << 25), 64, 1024);
  const int64_t limit = std::clamp<int64_t>(most(int64_t{3} << 27), 128, 8192);
  const int64_t pieces = std::max<int64_t>(1, (x.size(0) + limit - 1) / limit);
  return (x.size(0) + pieces * 128 - 1) / (pieces * 128) * 128;  // the products like round numbers
}

// Rows whose gradients of logits are held at once. On a GPU they are half as wide as the logits, and each
// product of them with x adds to all of the head's gradient, which is larger: few of them are wanted.
int64_t gradient_rows(const Tensor& x, int64_t vocabulary, int64_t rows) {
  if (x.is_cpu()) return rows;
  return std::max<int64_t>(1, (int64_t{3} << 29) / std::max<int64_t>(1, vocabulary) / rows) * rows;
}

// a b with sums and result in the work type: on a GPU from half-precision inputs, elsewhere converted first.
Tensor product(const Tensor& a, const Tensor& b, at::ScalarType work) {
  if (a.is_cuda() && at::isReducedFloatingType(a.scalar_type())) return at::mm(a, b, work);
  return at::mm(a.to(work), b.to(work));
}

struct Losses {
  Tensor loss;    // scalar
  Tensor nll;     // [T]
  Tensor d_x;     // [T, D], for a unit gradient of the loss; undefined where not wanted
  Tensor d_head;  // [V, D] the same, in the head's type (head_type)
};

at::ScalarType head_type(const Tensor& head) {
  return at::isReducedFloatingType(head.scalar_type()) ? head.scalar_type() : work_type(head);
}

Tensor row_losses_meta(const Tensor& logits, const Tensor& /*targets*/, const Tensor& /*weights*/,
                       const std::optional<Tensor>& /*d_logits*/) {
  return meta_tensor({logits.sym_size(0)}, logits);
}

// The plain way: any device and type.
Losses losses_composed(const Tensor& x, const Tensor& head, const Tensor& targets, const Tensor& weights,
                       bool want_x, bool want_head) {
  const auto work = work_type(x);
  const int64_t tokens = x.size(0), V = head.size(0), rows = chunk_rows(x, V),
                held = gradient_rows(x, V, rows);
  // Converted once, not once a chunk.
  const bool as_is = x.is_cuda() && at::isReducedFloatingType(x.scalar_type()), wanted = want_x || want_head;
  const Tensor matrix = as_is ? head : head.to(work);
  const Tensor weight = weights.to(work);
  static const auto row_losses = typed_op<decltype(softmax_loss_composition)>("godwit::softmax_loss_fwd");
  Losses out{.loss = {}, .nll = at::empty({tokens}, x.options().dtype(work)), .d_x = {}, .d_head = {}};
  if (want_x) out.d_x = at::empty(x.sizes(), x.options().dtype(work));
  if (want_head && tokens == 0) out.d_head = at::zeros(head.sizes(), head.options().dtype(head_type(head)));
  for (int64_t from = 0; from < tokens; from += held) {
    const int64_t n = std::min(held, tokens - from);
    const Tensor x_part = x.narrow(0, from, n);
    std::optional<Tensor> d_logits;
    if (wanted) d_logits = at::empty({n, V}, x.options().dtype(as_is ? x.scalar_type() : work));
    for (int64_t i = 0; i < n; i += rows) {
      const int64_t m = std::min(rows, n - i);
      const Tensor logits = product(x_part.narrow(0, i, m), matrix.t(), work);
      std::optional<Tensor> d_part;
      if (wanted) d_part = d_logits->narrow(0, i, m);
      out.nll.narrow(0, from + i, m)
          .copy_(
              row_losses.call(logits, targets.narrow(0, from + i, m), weight.narrow(0, from + i, m), d_part));
    }
    if (want_x) out.d_x.narrow(0, from, n).copy_(product(*d_logits, matrix, work));
    if (!want_head) continue;
    if (as_is && n == tokens) {
      out.d_head = at::mm(d_logits->t(), x_part);
    } else {
      const Tensor d_head = product(d_logits->t(), x_part, work);
      out.d_head = from == 0 ? d_head : out.d_head.add_(d_head);
    }
  }
  if (want_head) out.d_head = out.d_head.to(head_type(head));
  // An ignored row has nll 0, whatever its weight.
  out.loss = (out.nll * weight.masked_fill(targets.eq(kIgnored), 0)).sum();
  return out;
}

// On the CPU in fp32: our GEMM and softmax, one buffer of logits.
Losses losses_cpu(const Tensor& x, const Tensor& head, const Tensor& targets, const Tensor& weights,
                  bool want_x, bool want_head) {
  const Tensor hidden = as_float(x), matrix = as_float(head), index = targets.contiguous(),
               weight = as_float(weights);
  const int64_t tokens = x.size(0), width = x.size(1), vocabulary = head.size(0);
  const int64_t rows = std::min(tokens, chunk_rows(x, vocabulary));
  Losses out{.loss = {}, .nll = at::empty({tokens}, hidden.options()), .d_x = {}, .d_head = {}};
  if (want_x) out.d_x = at::empty(x.sizes(), hidden.options());
  if (want_head) out.d_head = at::zeros(head.sizes(), hidden.options());
  Tensor logits = at::empty({rows, vocabulary}, hidden.options());
  auto* buffer = logits.mutable_data_ptr<float>();
  const kernels::GemmOperand by_word{.data = matrix.const_data_ptr<float>(), .stride = width};
  for (int64_t from = 0; from < tokens; from += rows) {
    const int64_t n = std::min(rows, tokens - from);
    const kernels::GemmOperand x_part{.data = hidden.const_data_ptr<float>() + from * width, .stride = width};
    kernels::gemm({.m = n,
                   .n = vocabulary,
                   .depth = width,
                   .a = x_part,
                   .b = {.data = by_word.data, .stride = width, .transposed = true},
                   .c = buffer,
                   .c_stride = vocabulary});
    kernels::softmax_loss(n, {.vocabulary = vocabulary,
                              .logits = buffer,
                              .targets = index.const_data_ptr<int64_t>() + from,
                              .weights = weight.const_data_ptr<float>() + from,
                              .nll = out.nll.mutable_data_ptr<float>() + from,
                              .gradient = want_x || want_head});
    if (want_x) {
      kernels::gemm({.m = n,
                     .n = width,
                     .depth = vocabulary,
                     .a = {.data = buffer, .stride = vocabulary},
                     .b = by_word,
                     .c = out.d_x.mutable_data_ptr<float>() + from * width,
                     .c_stride = width});
    }
    if (want_head) {
      kernels::gemm({.m = vocabulary,
                     .n = width,
                     .depth = n,
                     .a = {.data = buffer, .stride = vocabulary, .transposed = true},
                     .b = x_part,
                     .c = out.d_head.mutable_data_ptr<float>(),
                     .c_stride = width,
                     .accumulate = true});
    }
  }
  if (want_head) out.d_head = out.d_head.to(head_type(head));
  // An ignored row has nll 0, whatever its weight.
  out.loss = (out.nll * weight.masked_fill(index.eq(kIgnored), 0)).sum();
  return out;
}

Losses losses(const Tensor& x, const Tensor& head, const Tensor& targets, const Tensor& weights, bool want_x,
              bool want_head) {
  const bool fused = x.is_cpu() && x.scalar_type() != at::kDouble;
  return fused ? losses_cpu(x, head, targets, weights, want_x, want_head)
               : losses_composed(x, head, targets, weights, want_x, want_head);
}

// losses() as an op, so that a recorded call is one call.
using Results = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Results fwd_losses(const Tensor& x, const Tensor& head, const Tensor& targets, const Tensor& weights,
                   bool want_x, bool want_head) {
  const at::NoGradGuard no_grad;
  check_arguments(x, head, targets, weights);
  const Losses r = losses(x, head, targets, weights, want_x, want_head);
  return {r.loss, r.nll, r.d_x, r.d_head};
}

Results fwd_meta(const Tensor& x, const Tensor& head, const Tensor& /*targets*/, const Tensor& /*weights*/,
                 bool want_x, bool want_head) {
  const auto work = work_type(x);
  return {meta_tensor({}, x, work), meta_tensor({x.sym_size(0)}, x, work),
          want_x ? meta_like(x, work) : Tensor(), want_head ? meta_like(head, head_type(head)) : Tensor()};
}

class CrossEntropy : public torch::autograd::Function<CrossEntropy> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                                                const Tensor& head, const Tensor& targets,
                                                const Tensor& weights) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_op<decltype(fwd_losses)>("godwit::linear_cross_entropy_fwd");
    const auto [loss, nll, d_x, d_head] =
        op.call(x, head, targets, weights, x.requires_grad(), head.requires_grad());
    ctx->save_for_backward({d_x, d_head, weights.requires_grad() ? nll : Tensor()});
    ctx->saved_data["x_type"] = x.scalar_type();
    ctx->saved_data["weight_type"] = weights.scalar_type();
    ctx->mark_non_differentiable({nll});
    return {loss, nll};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto scaled = [&](const Tensor& d, const char* key) {
      if (!d.defined()) return Tensor();
      const auto type = ctx->saved_data[key].toScalarType();
      if (at::GradMode::is_enabled()) return (d * grads[0]).to(type);
      static const auto op = typed_op<decltype(scaled_composition)>("godwit::scaled_fwd");
      return op.call(d, grads[0], type);
    };
    return {scaled(saved[0], "x_type"), scaled(saved[1], "x_type"), Tensor(),
            scaled(saved[2], "weight_type")};
  }
};

std::tuple<Tensor, Tensor> cross_entropy_composite(const Tensor& x, const Tensor& head, const Tensor& targets,
                                                   const Tensor& weights) {
  const bool wanted = x.requires_grad() || head.requires_grad() || weights.requires_grad();
  if (at::GradMode::is_enabled() && wanted) {
    const auto out = CrossEntropy::apply(x, head, targets, weights);
    return {out[0], out[1]};
  }
  static const auto op = typed_op<decltype(fwd_losses)>("godwit::linear_cross_entropy_fwd");
  const auto r = op.call(x, head, targets, weights, /*want_x=*/false, /*want_head=*/false);
  return {std::get<0>(r), std::get<1>(r)};
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "linear_cross_entropy(Tensor x, Tensor head, Tensor targets, Tensor weights) -> (Tensor loss, Tensor "
      "nll)");
  m.def(
      "linear_cross_entropy_fwd(Tensor x, Tensor head, Tensor targets, Tensor weights, bool want_x, bool "
      "want_head) -> "
      "(Tensor loss, Tensor nll, Tensor d_x, Tensor d_head)");
  m.def("softmax_loss_fwd(Tensor logits, Tensor targets, Tensor weights, Tensor(a!)? d_logits) -> Tensor");
  m.def("scaled_fwd(Tensor x, Tensor factor, ScalarType type) -> Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", cross_entropy_composite);
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy_fwd", fwd_losses);
  m.impl("softmax_loss_fwd", softmax_loss_composition);
  m.impl("scaled_fwd", scaled_composition);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("linear_cross_entropy_fwd", fwd_meta);
  m.impl("softmax_loss_fwd", row_losses_meta);
}

}  // namespace

Tensor softmax_loss_composition(const Tensor& logits, const Tensor& targets, const Tensor& weights,
                                const std::optional<Tensor>& d_logits) {
  const at::NoGradGuard no_grad;
  const Tensor ignored = targets.lt(0), index = targets.masked_fill(ignored, 0).unsqueeze(1);
  Tensor logp = at::log_softmax(logits, -1);
  const Tensor nll = logp.gather(1, index).squeeze(1).neg_().masked_fill_(ignored, 0);
  if (!d_logits.has_value()) return nll;
  logp.exp_().scatter_add_(1, index, at::full(index.sizes(), -1.0, logp.options()));
  logp.mul_(weights.to(logp.scalar_type()).masked_fill(ignored, 0).unsqueeze(1));
  d_logits->copy_(logp);
  return nll;
}

Tensor scaled_composition(const Tensor& x, const Tensor& factor, at::ScalarType type) {
  const at::NoGradGuard no_grad;
  return (x.to(work_type(x)) * factor).to(type);
}

std::tuple<Tensor, Tensor> linear_cross_entropy(const Tensor& x, const Tensor& head, const Tensor& targets,
                                                const Tensor& weights) {
  static const auto op = typed_op<decltype(cross_entropy_composite)>("godwit::linear_cross_entropy");
  return op.call(x, head, targets, weights);
}

}  // namespace godwit::ops
