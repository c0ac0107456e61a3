// Gated multi-head latent attention. Legend: T new tokens, S cached and new tokens, H heads, R latent rank, P
// positional width ("pe"), C nope width, V value width.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <limits>

#include "godwit/base/check.h"
#include "godwit/model/layers.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

struct Projected {
  Tensor q_nope;  // [T, H, C]
  Tensor q_pe;    // [T, H, P]
  Tensor latent;  // [T, R + P]: normalised latent | k_pe
};

// Positions [T] of the batch's tokens; sequence n starts at offsets[n].
Tensor positions(const Tensor& cu_seqlens, const std::vector<LatentCache>* cache, at::Device device) {
  const auto* cu = cu_seqlens.data_ptr<int64_t>();
  std::vector<Tensor> parts;
  for (int64_t n = 0; n + 1 < cu_seqlens.numel(); ++n) {
    const int64_t start = cache ? (*cache)[n].length : 0;
    parts.push_back(at::arange(start, start + cu[n + 1] - cu[n], at::kLong));
  }
  return at::cat(parts).to(device);
}

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
  const auto q_parts = q.view({T, m.heads, m.qk_dim()}).split_with_sizes({m.nope_dim, m.rope_dim}, -1);
  const auto kv_parts = ops::linear(x, w.kv_a).split_with_sizes({m.kv_lora_rank, m.rope_dim}, -1);
  const Tensor normed = ops::rms_norm(kv_parts[0].contiguous(), w.kv_a_norm, kMlaNormEps);
  Projected out{.q_nope = q_parts[0], .q_pe = q_parts[1], .latent = {}};
  Tensor k_pe = kv_parts[1];
  if (m.rotary) {
    const Tensor position = positions(context.cu_seqlens, context.cache, x.device());
    out.q_pe = rotate(out.q_pe, position, m.rope_theta);
    k_pe = rotate(k_pe, position, m.rope_theta);
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
  const Tensor q_HTK = q.detach().transpose(0, 1), k_HKT = k.detach().permute({1, 2, 0});
  for (int64_t n = 0; n + 1 < cu_seqlens.numel(); ++n) {
    for (int64_t row = cu[n]; row < cu[n + 1]; row += kRows) {
      const int64_t end = std::min(cu[n + 1], row + kRows);
      Tensor scores = at::matmul(q_HTK.slice(1, row, end), k_HKT.slice(2, cu[n], end)) * scale;
      const Tensor future =
          at::ones({end - row, end - cu[n]}, scores.options().dtype(at::kBool)).triu(row - cu[n] + 1);
      scores = scores.masked_fill(future, -std::numeric_limits<double>::infinity());
      largest = at::maximum(largest, scores.amax({1, 2}).to(at::kFloat));
    }
  }
  return largest;
}

// One new token a sequence against its cache; keys and values stay compressed (W_UK folded into q, W_UV into
// the output). Returns [T, H, V]. window > 0: only the last `window` rows.
Tensor absorbed(const MlaConfig& m, const MlaWeights& w, const Projected& p,
                const std::vector<LatentCache>& cache, int64_t window) {
  const int64_t N = p.q_nope.size(0), R = m.kv_lora_rank;
  const auto kv_b =
      w.kv_b.view({m.heads, m.nope_dim + m.v_dim, R}).split_with_sizes({m.nope_dim, m.v_dim}, 1);
  const Tensor q_latent = at::bmm(p.q_nope.transpose(0, 1), kv_b[0]).transpose(0, 1);  // [N, H, R]
  const Tensor query = at::cat({q_latent, p.q_pe}, -1);
  const double scale = 1.0 / std::sqrt(static_cast<double>(m.qk_dim()));
  std::vector<Tensor> outputs;
  for (int64_t n = 0; n < N; ++n) {
    Tensor rows = cache[n].view();
    if (window > 0 && rows.size(0) > window) rows = rows.narrow(0, rows.size(0) - window, window);
    const Tensor scores = at::matmul(query[n], rows.t()).to(at::kFloat) * scale;  // [H, S]
    outputs.push_back(at::matmul(at::softmax(scores, -1).to(rows.scalar_type()), rows.narrow(1, 0, R)));
  }
  const Tensor o_latent = at::stack(outputs);  // [N, H, R]
  return at::bmm(o_latent.transpose(0, 1), kv_b[1].transpose(1, 2)).transpose(0, 1);
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

// Appends the new rows to the caches; returns all rows of all sequences and their offsets.
std::pair<Tensor, Tensor> extend(std::vector<LatentCache>& cache, const Tensor& latent,
                                 const Tensor& cu_seqlens) {
  const auto* cu = cu_seqlens.data_ptr<int64_t>();
  std::vector<Tensor> rows;
  std::vector<int64_t> lengths;
  for (size_t n = 0; n < cache.size(); ++n) {
    cache[n].append(latent.slice(0, cu[n], cu[n + 1]));
    rows.push_back(cache[n].view());
    lengths.push_back(cache[n].length);
  }
  return {at::cat(rows), make_cu_seqlens(lengths)};
}

}  // namespace

Tensor mla_layer(const ModelConfig& config, const MlaWeights& w, const Tensor& x, const MlaContext& context) {
  const MlaConfig& m = config.mla;
  const int64_t T = x.size(0);
  const Projected p = project(config, w, x, context);
  const bool local_global = m.gate == MlaGate::kLocalGlobal;
  Tensor out, local;
  if (context.cache && T == static_cast<int64_t>(context.cache->size()) &&
      context.cu_seqlens.diff().eq(1).all().item<bool>()) {
    for (int64_t n = 0; n < T; ++n) (*context.cache)[n].append(p.latent.narrow(0, n, 1));
    out = absorbed(m, w, p, *context.cache, m.window);
    if (local_global) local = absorbed(m, w, p, *context.cache, m.local_window);
  } else {
    Tensor rows = p.latent, cu_k = context.cu_seqlens;
    if (context.cache) std::tie(rows, cu_k) = extend(*context.cache, p.latent, context.cu_seqlens);
    const auto [k, v] = expand(m, w, rows);
    const Tensor q = at::cat({p.q_nope, p.q_pe}, -1);
    const double scale = 1.0 / std::sqrt(static_cast<double>(m.qk_dim()));
    if (context.max_logit) *context.max_logit = max_logits(q, k, cu_k, scale, context.qk_limit);
    out = ops::attention(q, k, v, context.cu_seqlens, cu_k, scale, m.window);
    if (local_global) local = ops::attention(q, k, v, context.cu_seqlens, cu_k, scale, m.local_window);
  }
  if (m.gate != MlaGate::kNone) {
    const Tensor gate = at::sigmoid(ops::linear(x, w.g_proj)).view({T, m.heads, m.v_dim});
    out = local_global ? gate * out + (1 - gate) * local : gate * out;
  }
  return ops::linear(out.reshape({T, m.heads * m.v_dim}), w.o_proj);
}

}  // namespace godwit
