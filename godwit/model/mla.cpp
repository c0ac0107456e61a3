// Gated multi-head latent attention. Legend: T new tokens, S cached and new tokens, H heads, R latent rank, P
// positional width ("pe"), C nope width, V value width.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <limits>

#include "godwit/base/check.h"
#include "godwit/model/layers.h"
#include "godwit/ops/layer_step.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

struct Projected {
  Tensor q;       // [T, H, C + P], where nothing is rotated
  Tensor q_nope;  // [T, H, C]
  Tensor q_pe;    // [T, H, P]
  Tensor latent;  // [T, R + P]: normalised latent | k_pe
};

// Rotates interleaved pairs of the last dimension: t [T, ..., P], position [T] (RoFormer, arXiv:2104.09864).
Tensor rotate(const Tensor& t, const Tensor& position, double theta) {
  const int64_t P = t.size(-1);
  const Tensor inv_freq =
      at::pow(theta, at::arange(0, P, 2, t.options().dtype(at::kDouble)).neg() / static_cast<double>(P));
  Tensor angle = at::outer(position.to(at::kDouble), inv_freq);  // fp64: a million positions need it
  while (angle.dim() < t.dim()) angle = angle.unsqueeze(1);
  const Tensor cos = at::cos(angle).to(t.scalar_type()), sin = at::sin(angle).to(t.scalar_type());
  const Tensor even = t.slice(-1, 0, P, 2), odd = t.slice(-1, 1, P, 2);
  return at::stack({even * cos - odd * sin, even * sin + odd * cos}, -1).flatten(-2);
}

Projected project(const ModelConfig& config, const MlaWeights& w, const Tensor& x,
                  const MlaContext& context) {
  const MlaConfig& m = config.mla;
  const int64_t T = x.size(0);
  const Tensor q = m.q_lora_rank > 0
                       ? ops::linear(ops::rms_norm(ops::linear(x, w.q_a), w.q_a_norm, kMlaNormEps), w.q_b)
                       : ops::linear(x, w.q_proj);
  const Tensor heads = q.view({T, m.heads, m.qk_dim()});
  const auto q_parts = heads.split_with_sizes({m.nope_dim, m.rope_dim}, -1);
  const auto kv_parts = ops::linear(x, w.kv_a).split_with_sizes({m.kv_lora_rank, m.rope_dim}, -1);
  const Tensor normed = ops::rms_norm(kv_parts[0].contiguous(), w.kv_a_norm, kMlaNormEps);
  Projected out{.q = m.rotary ? Tensor() : heads, .q_nope = q_parts[0], .q_pe = q_parts[1], .latent = {}};
  Tensor k_pe = kv_parts[1];
  if (m.rotary) {
    out.q_pe = rotate(out.q_pe, context.position, m.rope_theta);
    k_pe = rotate(k_pe, context.position, m.rope_theta);
  }
  out.latent = at::cat({normed, k_pe}, -1);
  return out;
}

// Largest logit of each head: the bound max|q| max|k| where that already lies below `limit`, exact otherwise.
Tensor max_logits(const Tensor& q, const Tensor& k, const Tensor& cu_seqlens, double scale, double limit) {
  const at::NoGradGuard no_grad;
  const Tensor bound = q.detach().norm(2, -1).amax(0) * k.detach().norm(2, -1).amax(0) * scale;
  if (bound.max().item<double>() <= limit) return bound.to(at::kFloat);
  constexpr int64_t kRows = 256;
  Tensor largest =
      at::full({q.size(1)}, -std::numeric_limits<float>::infinity(), q.options().dtype(at::kFloat));
  const auto* cu = cu_seqlens.data_ptr<int64_t>();
  const auto on_device = q.options().dtype(at::kLong);
  const Tensor start_T =  // of the sequence that a row is in
      at::repeat_interleave(cu_seqlens.slice(0, 0, -1), cu_seqlens.diff()).to(q.device());
  const Tensor q_HTK = q.detach().transpose(0, 1), k_HKT = k.detach().permute({1, 2, 0});
  int64_t sequence = 0;
  for (int64_t row = 0; row < q.size(0); row += kRows) {  // of any sequences: many are far shorter
    while (cu[sequence + 1] <= row) ++sequence;
    const int64_t end = std::min(q.size(0), row + kRows), begin = cu[sequence];
    const Tensor scores = at::matmul(q_HTK.slice(1, row, end), k_HKT.slice(2, begin, end)) * scale;
    const Tensor key = at::arange(begin, end, on_device),
                 query = at::arange(row, end, on_device).unsqueeze(1);
    const Tensor unseen = (key > query).logical_or(key < start_T.slice(0, row, end).unsqueeze(1));
    largest = at::maximum(
        largest,
        scores.masked_fill(unseen, -std::numeric_limits<double>::infinity()).amax({1, 2}).to(at::kFloat));
  }
  return largest;
}

// The `places.steps` step rows each against the pages it sees; keys and values stay compressed
// (W_UK folded into q, W_UV into the output). Returns [steps, H, V]. window > 0: only the last `window` rows.
Tensor absorbed(const MlaConfig& m, const MlaWeights& w, const Projected& p, const Tensor& pages,
                const StatePlaces& places, int64_t window) {
  const int64_t n = places.steps, R = m.kv_lora_rank;
  const auto kv_b =
      w.kv_b.view({m.heads, m.nope_dim + m.v_dim, R}).split_with_sizes({m.nope_dim, m.v_dim}, 1);
  const Tensor q_latent = ops::linear_heads(p.q_nope.slice(0, 0, n), kv_b[0].transpose(1, 2));  // [n, H, R]
  const Tensor query = at::cat({q_latent, p.q_pe.slice(0, 0, n)}, -1);
  const Tensor o_latent =
      ops::mla_decode(query, pages, places.step_table, places.step_lengths, R, m.scale(), window);
  return ops::linear_heads(o_latent, kv_b[1]);
}

// Keys [S, H, C + P] and values [S, H, V] from latent rows [S, R + P].
std::pair<Tensor, Tensor> expand(const MlaConfig& m, const MlaWeights& w, const Tensor& rows) {
  const int64_t S = rows.size(0);
  const auto parts = rows.split_with_sizes({m.kv_lora_rank, m.rope_dim}, -1);
  const auto kv = ops::linear(parts[0], w.kv_b)
                      .view({S, m.heads, m.nope_dim + m.v_dim})
                      .split_with_sizes({m.nope_dim, m.v_dim}, -1);
  const Tensor k_pe = parts[1].unsqueeze(1).expand({S, m.heads, m.rope_dim});
  return {at::cat({kv[0], k_pe}, -1), kv[1].contiguous()};
}

// The new tokens' rows to their places among the pages. What fp8 cannot hold becomes its largest number.
void store_rows(const Tensor& pages, const Tensor& places, const Tensor& latent) {
  const Tensor rows = pages.view({-1, pages.size(2)});
  if (pages.scalar_type() != kFp8Latent) {
    rows.index_copy_(0, places, latent);
    return;
  }
  constexpr double kLargest = 448;
  rows.view(at::kByte).index_copy_(0, places,
                                   latent.clamp(-kLargest, kLargest).to(kFp8Latent).view(at::kByte));
}

// All rows of the sequences from `first` on, in `type`, and their offsets.
std::pair<Tensor, Tensor> gather_rows(const Tensor& pages, const StatePlaces& places, int64_t first,
                                      at::ScalarType type) {
  const Tensor table = places.table.to(pages.device());
  std::vector<Tensor> rows;
  std::vector<int64_t> lengths;
  for (int64_t n = first; n < places.lengths.size(0); ++n) {
    const int64_t length = places.lengths[n].item<int64_t>();
    const Tensor used = table[n].narrow(0, 0, (length + kLatentPage - 1) / kLatentPage);
    const Tensor bytes = pages.scalar_type() == kFp8Latent ? pages.view(at::kByte) : pages;
    const Tensor row = bytes.index_select(0, used).flatten(0, 1).narrow(0, 0, length);
    rows.push_back(row.scalar_type() == pages.scalar_type() ? row : row.view(kFp8Latent).to(type));
    lengths.push_back(length);
  }
  return {rows.size() == 1 ? rows[0] : at::cat(rows), make_cu_seqlens(lengths)};
}

// What one attention of the layer is made of: the tokens from `first` on in expanded form.
struct Expanded {
  Tensor q, k, v, cu_q, cu_k;
};

Expanded expanded_form(const MlaConfig& m, const MlaWeights& w, const Projected& p,
                       const MlaContext& context) {
  const int64_t first = context.places ? context.places->steps : 0;
  const int64_t sequence = context.places ? context.places->step_sequences : 0;
  Expanded out;
  out.cu_q = first > 0 ? context.cu_seqlens.slice(0, sequence) - first : context.cu_seqlens;
  Tensor rows = p.latent;
  out.cu_k = out.cu_q;
  if (context.places) {
    std::tie(rows, out.cu_k) = gather_rows(*context.pages, *context.places, sequence, p.latent.scalar_type());
  }
  if (context.rows) {
    rows = at::cat({*context.rows, p.latent});
    out.cu_k = make_cu_seqlens({rows.size(0)});
    *context.rows = p.latent;
  }
  std::tie(out.k, out.v) = expand(m, w, rows);
  out.q =
      p.q.defined() ? p.q.slice(0, first) : at::cat({p.q_nope.slice(0, first), p.q_pe.slice(0, first)}, -1);
  return out;
}

Tensor fused_step(const ModelConfig& config, const MlaWeights& w, const Tensor& x,
                  const MlaContext& context) {
  const MlaConfig& m = config.mla;
  const bool compressed = m.q_lora_rank > 0;
  return ops::mla_layer_step({.q_a = compressed ? &w.q_a : nullptr,
                              .q_b = compressed ? &w.q_b : &w.q_proj,
                              .kv_a = &w.kv_a,
                              .kv_b = &w.kv_b,
                              .g = m.gate == MlaGate::kNone ? nullptr : &w.g_proj,
                              .o = &w.o_proj,
                              .q_a_norm = w.q_a_norm,
                              .kv_a_norm = w.kv_a_norm,
                              .heads = m.heads,
                              .nope = m.nope_dim,
                              .rope = m.rope_dim,
                              .value = m.v_dim,
                              .rank = m.kv_lora_rank,
                              .scale = m.scale(),
                              .norm_eps = kMlaNormEps,
                              .window = m.window,
                              .pages = *context.pages,
                              .table = context.places->step_table,
                              .lengths = context.places->step_lengths,
                              .rows = context.places->rows},
                             x);
}

}  // namespace

Tensor mla_layer(const ModelConfig& config, const MlaWeights& w, const Tensor& x, const MlaContext& context) {
  const MlaConfig& m = config.mla;
  if (context.places && context.places->fused && !m.rotary && m.gate != MlaGate::kLocalGlobal)
    return fused_step(config, w, x, context);
  const int64_t T = x.size(0);
  const Projected p = project(config, w, x, context);
  if (context.places) store_rows(*context.pages, context.places->rows, p.latent);
  const int64_t steps = context.places ? context.places->steps : 0;
  Expanded e;
  if (steps < T || steps == 0) {
    e = expanded_form(m, w, p, context);
    if (context.max_logit) *context.max_logit = max_logits(e.q, e.k, e.cu_k, m.scale(), context.qk_limit);
  }
  const auto attend = [&](int64_t window) {
    std::vector<Tensor> parts;
    if (steps > 0) parts.push_back(absorbed(m, w, p, *context.pages, *context.places, window));
    if (e.q.defined()) parts.push_back(ops::attention(e.q, e.k, e.v, e.cu_q, e.cu_k, m.scale(), window));
    return parts.size() == 1 ? parts[0] : at::cat(parts);
  };
  const bool local_global = m.gate == MlaGate::kLocalGlobal;
  Tensor out = attend(m.window);
  const Tensor local = local_global ? attend(m.local_window) : Tensor();
  if (m.gate != MlaGate::kNone) {
    const Tensor gate = ops::linear(x, w.g_proj).view({T, m.heads, m.v_dim});
    // gate * out + (1 - gate) * local
    out = local_global ? local + ops::sigmoid_gate(out - local, gate) : ops::sigmoid_gate(out, gate);
  }
  return ops::linear(out.reshape({T, m.heads * m.v_dim}), w.o_proj);
}

}  // namespace godwit
