// attention: on the CPU in fp32 with widths that are multiples of 16 our own kernels (docs/attention.md),
// whose rows depend on nothing but what they see. On a GPU in 16 bits one launch of PyTorch's flash kernel
// for all sequences (flash_packed.h), but where cuDNN is faster: whole sequences of one round length, long
// documents (attention_documents.h) and long contexts (attention_past.h).
// Elsewhere one scaled_dot_product_attention per sequence (flash on both devices), cut into blocks of queries
// where a mask is needed, so that no [T, T] matrix is ever held:
//   whole sequence, no window      is_causal, no mask; a batch of them where all are equally long
//   one query                      no mask: it sees every key in its window
//   queries after cached keys      on a GPU one call whose causal corner is at the bottom right; else blocks
//                                  of kBlock queries, mask [kBlock, keys up to the block's end]
//   window                         blocks of queries over the band of keys they can see: linear in T
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "godwit/ops/arguments.h"
#include "godwit/ops/attention_documents.h"
#include "godwit/ops/attention_past.h"
#include "godwit/ops/autograd_util.h"
#include "godwit/ops/flash_packed.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "attention";
constexpr int64_t kBlock = 256;
constexpr int64_t kPlanned = 1024;  // lengths for which cuDNN's plans are worth their making: multiples of it

void check_offsets(const Argument& cu, int64_t total) {
  check_type(cu, at::kLong);
  TORCH_CHECK(cu.tensor.device().is_cpu() && cu.tensor.dim() == 1 && cu.tensor.numel() >= 1, kOp, ": ",
              cu.name, ": expected int64 [N+1] on the CPU, got ", cu.tensor.sizes(), " on ",
              cu.tensor.device());
  const Tensor offsets = cu.tensor.contiguous();
  const auto* at = offsets.const_data_ptr<int64_t>();
  const int64_t n = offsets.numel();
  TORCH_CHECK(at[0] == 0 && at[n - 1] == total, kOp, ": ", cu.name, ": expected offsets from 0 to ", total,
              ", got ", at[0], " to ", at[n - 1]);
  for (int64_t i = 1; i < n; ++i) {
    TORCH_CHECK(at[i] >= at[i - 1], kOp, ": ", cu.name, ": expected ascending offsets, got ", at[i - 1],
                " before ", at[i], " at ", i);
  }
}

void check_arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                     const Tensor& cu_k, int64_t window) {
  const Argument q_arg{kOp, "q", q};
  check_float(q_arg, 3);
  check_float({kOp, "k", k}, 3);
  check_float({kOp, "v", v}, 3);
  check_shape({kOp, "k", k}, {k.size(0), q.size(1), q.size(2)});
  check_shape({kOp, "v", v}, {k.size(0), q.size(1), v.size(2)});
  check_like({kOp, "k", k}, q_arg);
  check_like({kOp, "v", v}, q_arg);
  check_offsets({kOp, "cu_q", cu_q}, q.size(0));
  check_offsets({kOp, "cu_k", cu_k}, k.size(0));
  check_shape({kOp, "cu_k", cu_k}, cu_q.sizes());
  const Tensor starts_q = cu_q.contiguous(), starts_k = cu_k.contiguous();
  const auto* at_q = starts_q.const_data_ptr<int64_t>();
  const auto* at_k = starts_k.const_data_ptr<int64_t>();
  for (int64_t n = 0; n + 1 < cu_q.numel(); ++n) {
    const int64_t queries = at_q[n + 1] - at_q[n], keys = at_k[n + 1] - at_k[n];
    TORCH_CHECK(keys >= queries, kOp, ": cu_k: sequence ", n, ": expected at least its ", queries,
                " queries in keys, got ", keys);
  }
  TORCH_CHECK(window >= 0, kOp, ": window: expected 0 (none) or positive, got ", window);
}

// One sequence, heads first: q [1, H, Tq, Dk], k [1, H, Tk, Dk], v [1, H, Tk, Dv].
struct Sequence {
  Tensor q;
  Tensor k;
  Tensor v;
  double scale;
  int64_t window;
  [[nodiscard]] int64_t queries() const { return q.size(2); }
  [[nodiscard]] int64_t keys() const { return k.size(2); }
};

// Queries [from, to) of the sequence over the keys they can see.
Tensor query_block(const Sequence& s, int64_t from, int64_t to) {
  const int64_t past = s.keys() - s.queries();  // keys before the first query
  const int64_t key_end = past + to;
  const int64_t key_begin = s.window > 0 ? std::max<int64_t>(0, past + from - s.window + 1) : 0;
  const Tensor q = s.q.narrow(2, from, to - from);
  const Tensor k = s.k.narrow(2, key_begin, key_end - key_begin);
  const Tensor v = s.v.narrow(2, key_begin, key_end - key_begin);
  std::optional<Tensor> visible;
  if (to - from > 1) {
    const auto index = q.options().dtype(at::kLong);
    const Tensor behind = at::arange(past + from, past + to, index).unsqueeze(1) -
                          at::arange(key_begin, key_end, index).unsqueeze(0);
    visible = behind >= 0;
    if (s.window > 0) visible = visible->logical_and(behind < s.window);
  }
  return at::scaled_dot_product_attention(q, k, v, visible, /*dropout_p=*/0.0, /*is_causal=*/false, s.scale);
}

// Queries after cached keys on a GPU: the mask's corner is at the bottom right, and no mask is ever held.
Tensor after_keys(const Sequence& s) {
  constexpr int64_t kCausalFromBottomRight = 2;
  const auto tokens_first = [](const Tensor& x) { return x.transpose(1, 2).contiguous(); };
  const auto out = at::_efficient_attention_forward(
      tokens_first(s.q), tokens_first(s.k), tokens_first(s.v), /*bias=*/{}, /*cu_seqlens_q=*/{},
      /*cu_seqlens_k=*/{}, /*max_seqlen_q=*/std::nullopt, /*max_seqlen_k=*/std::nullopt, /*dropout_p=*/0.0,
      kCausalFromBottomRight, /*compute_log_sumexp=*/needs_grad(s.q, s.k, s.v), s.scale);
  return std::get<0>(out).transpose(1, 2);
}

// [1, H, Tq, Dv]
Tensor one_sequence(const Sequence& s) {
  const bool windowed = s.window > 0 && s.window < s.keys();
  if (s.queries() == s.keys() && !windowed) {
    return at::scaled_dot_product_attention(s.q, s.k, s.v, {}, /*dropout_p=*/0.0, /*is_causal=*/true,
                                            s.scale);
  }
  if (!windowed && s.q.is_cuda() && s.q.size(3) % 8 == 0 && s.v.size(3) % 8 == 0) return after_keys(s);
  const int64_t block = windowed ? std::max(kBlock, std::min<int64_t>(s.window, 4 * kBlock)) : kBlock;
  std::vector<Tensor> out;
  for (int64_t from = 0; from < s.queries(); from += block) {
    out.push_back(query_block(s, from, std::min(s.queries(), from + block)));
  }
  return out.size() == 1 ? out[0] : at::cat(out, 2);
}

// The sequences of a call.
struct Pack {
  const Tensor& cu_q;
  const Tensor& cu_k;
  double scale;
  int64_t window;
  bool whole;    // no cached keys
  int64_t even;  // the length of all sequences where they are whole and equally long, and no window; else 0
};
Pack pack_of(const Tensor& cu_q, const Tensor& cu_k, double scale, int64_t window) {
  Pack p{cu_q, cu_k, scale, window, cu_q.is_same(cu_k) || cu_q.equal(cu_k), 0};
  if (!p.whole || window > 0 || cu_q.numel() < 2) return p;
  const Tensor lengths = cu_q.diff();
  if ((lengths == lengths[0]).all().item<bool>()) p.even = lengths[0].item<int64_t>();
  return p;
}

std::vector<Tensor> by_sequence(const Tensor& x, const int64_t* offsets, int64_t sequences) {
  if (sequences == 1) return {x};  // the gradient of a split is a copy
  std::vector<int64_t> lengths(sequences);
  for (int64_t n = 0; n < sequences; ++n) lengths[n] = offsets[n + 1] - offsets[n];
  return at::split_with_sizes(x, lengths);
}

Tensor by_sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const Pack& pack) {
  const auto& [cu_q, cu_k, scale, window, whole, even] = pack;
  const Tensor starts_q = cu_q.contiguous(), starts_k = cu_k.contiguous();
  const auto* at_q = starts_q.const_data_ptr<int64_t>();
  const auto* at_k = starts_k.const_data_ptr<int64_t>();
  // The CPU's flash kernel wants one width for keys and values: zeros are appended and cut off again.
  const int64_t pad = q.is_cpu() && v.size(2) < q.size(2) ? q.size(2) - v.size(2) : 0;
  const Tensor values = pad > 0 ? at::constant_pad_nd(v, {0, pad}) : v;
  if (even > 0) {
    const auto batch = [length = even](const Tensor& x) {
      return x.view({-1, length, x.size(1), x.size(2)}).transpose(1, 2);
    };
    const Tensor o =
        at::scaled_dot_product_attention(batch(q), batch(k), batch(values), {}, /*dropout_p=*/0.0,
                                         /*is_causal=*/true, scale);
    return o.transpose(1, 2).reshape({q.size(0), q.size(1), -1}).narrow(2, 0, v.size(2)).contiguous();
  }
  // Split, not narrowed: the gradient of N narrows is N tensors of the whole length, that of a split is one.
  const std::vector<Tensor> qs = by_sequence(q, at_q, cu_q.numel() - 1),
                            ks = by_sequence(k, at_k, cu_q.numel() - 1),
                            vs = by_sequence(values, at_k, cu_q.numel() - 1);
  const auto heads_first = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  std::vector<Tensor> out;
  for (size_t n = 0; n < qs.size(); ++n) {
    if (qs[n].size(0) == 0) continue;
    const Tensor o = one_sequence({.q = heads_first(qs[n]),
                                   .k = heads_first(ks[n]),
                                   .v = heads_first(vs[n]),
                                   .scale = scale,
                                   .window = window});
    out.push_back(o.squeeze(0).narrow(2, 0, v.size(2)).transpose(0, 1));
  }
  if (out.empty()) return q.narrow(2, 0, 0).sum(2, true).expand({0, q.size(1), v.size(2)}).contiguous();
  return out.size() == 1 ? out[0].contiguous() : at::cat(out);
}

// On a GPU in 16 bits where nobody watches.
Tensor by_gpu(const Tensor& q, const Tensor& k, const Tensor& v, const Pack& pack) {
  if (pack.cu_q.numel() == 2 && pack.window == 0 && !needs_grad(q, k, v) &&
      takes_attention_over_past(q, k, v)) {
    return attention_over_past(q, k, v, pack.scale);
  }
  const bool planned = pack.even > 0 && pack.even % kPlanned == 0;
  if (!takes_flash_packed(q, v) || planned) return by_sdpa(q, k, v, pack);
  if (pack.whole && pack.window == 0 && takes_attention_by_documents(q, v, pack.cu_q))
    return attention_by_documents(q, k, v, pack.cu_q, pack.scale);
  return flash_packed(q, k, v, pack.cu_q, pack.cu_k, {.scale = pack.scale, .window = pack.window});
}

using Forward = std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                           const Tensor&, double, int64_t, bool);
using Backward = std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, double, int64_t);

class Attention : public torch::autograd::Function<Attention> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& cu_q, const Tensor& cu_k, double scale,
                        int64_t window) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_handle<Forward>("godwit::attention_fwd");
    const auto [o, lse] = op.call(q, k, v, cu_q, cu_k, scale, window, /*save=*/true);
    ctx->save_for_backward({q, k, v, cu_q, cu_k, o, lse});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window"] = window;
    return o;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    static const auto op = typed_handle<Backward>("godwit::attention_bwd");
    const auto keep = ctx->get_saved_variables();
    torch::autograd::variable_list out(7);  // one for each argument of forward
    {
      const at::NoGradGuard no_grad;
      std::tie(out[0], out[1], out[2]) =
          op.call(grads[0], keep[0], keep[1], keep[2], keep[3], keep[4], keep[5], keep[6],
                  ctx->saved_data["scale"].toDouble(), ctx->saved_data["window"].toInt());
    }
    return once_differentiable(kOp, keep[0].requires_grad() ? keep[0] : keep[keep[1].requires_grad() ? 1 : 2],
                               std::move(out));
  }
};

// by_sdpa() as ops: how many calls it makes depends on the values of cu_q, so where calls are recorded the
// whole is one call, and its backward computes it again.
Tensor plain_fwd(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                 double scale, int64_t window) {
  const at::NoGradGuard no_grad;
  check_arguments(q, k, v, cu_q, cu_k, window);
  return by_sdpa(q, k, v, pack_of(cu_q, cu_k, scale, window));
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients plain_bwd(const Tensor& grad_o, const Tensor& q, const Tensor& k, const Tensor& v,
                    const Tensor& cu_q, const Tensor& cu_k, double scale, int64_t window) {
  const Pack pack = pack_of(cu_q, cu_k, scale, window);
  const auto d = composition_grads({q, k, v}, {grad_o}, [&](const torch::autograd::variable_list& x) {
    return torch::autograd::variable_list{by_sdpa(x[0], x[1], x[2], pack)};
  });
  return {d[0].contiguous(), d[1].contiguous(), d[2].contiguous()};
}

class PlainAttention : public torch::autograd::Function<PlainAttention> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& cu_q, const Tensor& cu_k, double scale,
                        int64_t window) {
    const at::AutoDispatchBelowADInplaceOrView below;
    static const auto op = typed_handle<decltype(plain_fwd)>("godwit::attention_plain_fwd");
    ctx->save_for_backward({q, k, v, cu_q, cu_k});
    ctx->saved_data["scale"] = scale;
    ctx->saved_data["window"] = window;
    return op.call(q, k, v, cu_q, cu_k, scale, window);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& grads) {
    static const auto op = typed_handle<decltype(plain_bwd)>("godwit::attention_plain_bwd");
    const auto s = ctx->get_saved_variables();
    const auto [d_q, d_k, d_v] =
        op.call(grads[0], s[0], s[1], s[2], s[3], s[4], ctx->saved_data["scale"].toDouble(),
                ctx->saved_data["window"].toInt());
    return {d_q, d_k, d_v, Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor attention_composite(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                           const Tensor& cu_k, double scale, int64_t window) {
  if (!is_dataless(q)) check_arguments(q, k, v, cu_q, cu_k, window);
  const bool kernels = q.is_cpu() && q.scalar_type() == at::kFloat && q.size(1) > 0 && q.size(2) > 0 &&
                       v.size(2) > 0 && q.size(2) % 16 == 0 && v.size(2) % 16 == 0;
  if (!kernels) {
    if (is_observed(q)) return PlainAttention::apply(q, k, v, cu_q, cu_k, scale, window);
    const Pack pack = pack_of(cu_q, cu_k, scale, window);
    return q.is_cuda() ? by_gpu(q, k, v, pack) : by_sdpa(q, k, v, pack);
  }
  if (needs_grad(q, k, v)) return Attention::apply(q, k, v, cu_q, cu_k, scale, window);
  static const auto op = typed_handle<Forward>("godwit::attention_fwd");
  return std::get<0>(op.call(q, k, v, cu_q, cu_k, scale, window, /*save=*/false));
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, float scale, int window) -> Tensor");
  m.def(
      "attention_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, float scale, int window, bool "
      "save) "
      "-> (Tensor, Tensor)");
  m.def(
      "attention_bwd(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor o, Tensor "
      "lse, "
      "float scale, int window) -> (Tensor, Tensor, Tensor)");
  m.def(
      "attention_plain_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, float scale, int window) "
      "-> Tensor");
  m.def(
      "attention_plain_bwd(Tensor grad_o, Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, float "
      "scale, int window) -> "
      "(Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(godwit, CompositeImplicitAutograd, m) {
  m.impl("attention", attention_composite);
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("attention_plain_fwd", plain_fwd);
  m.impl("attention_plain_bwd", plain_bwd);
}

Tensor plain_fwd_meta(const Tensor& q, const Tensor& /*k*/, const Tensor& v, const Tensor& /*cu_q*/,
                      const Tensor& /*cu_k*/, double /*scale*/, int64_t /*window*/) {
  return meta_tensor({q.sym_size(0), q.sym_size(1), v.sym_size(2)}, q);
}
Gradients plain_bwd_meta(const Tensor& /*grad_o*/, const Tensor& q, const Tensor& k, const Tensor& v,
                         const Tensor& /*cu_q*/, const Tensor& /*cu_k*/, double /*scale*/,
                         int64_t /*window*/) {
  return {meta_like(q), meta_like(k), meta_like(v)};
}
std::tuple<Tensor, Tensor> fwd_meta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q,
                                    const Tensor& cu_k, double scale, int64_t window, bool save) {
  const Tensor o = plain_fwd_meta(q, k, v, cu_q, cu_k, scale, window);
  return {o, meta_tensor({save ? q.sym_size(0) : c10::SymInt(0), q.sym_size(1)}, q)};
}
Gradients bwd_meta(const Tensor& /*grad_o*/, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& /*cu_q*/, const Tensor& /*cu_k*/, const Tensor& /*o*/, const Tensor& /*lse*/,
                   double /*scale*/, int64_t /*window*/) {
  return {meta_like(q), meta_like(k), meta_like(v)};
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("attention_plain_fwd", plain_fwd_meta);
  m.impl("attention_plain_bwd", plain_bwd_meta);
  m.impl("attention_fwd", fwd_meta);
  m.impl("attention_bwd", bwd_meta);
}

}  // namespace

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                 double scale, int64_t window) {
  static const auto op = typed_handle<decltype(attention_composite)>("godwit::attention");
  return op.call(q, k, v, cu_q, cu_k, scale, window);
}

}  // namespace godwit::ops
