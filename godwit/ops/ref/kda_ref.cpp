#include "godwit/ops/ref/kda_ref.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "godwit/ops/autograd_util.h"

namespace godwit::ops::ref {
namespace {

using at::Tensor;

constexpr int64_t kChunk = 64;      // tokens between two states
constexpr int64_t kTile = 16;       // tokens whose decays are multiplied out around one anchor
constexpr double kMaxDecay = 80.0;  // exp(80) is finite in fp32, with room for the products it enters

at::ScalarType compute_type(const KdaArgs& args) {
  return args.v.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// a / sqrt(sum a^2 + 1e-6) over the last dimension: the epsilon is added to the sum.
Tensor l2_normalize(const Tensor& a) {
  return a * at::rsqrt((a * a).sum(-1, /*keepdim=*/true) + 1e-6);
}

Tensor initial_or_zeros(const KdaArgs& args, int64_t sequences, at::ScalarType type) {
  if (args.initial_state.has_value()) return args.initial_state->to(type);
  return at::zeros({sequences, args.q.size(1), args.q.size(2), args.v.size(2)}, args.v.options().dtype(type));
}

// Where the tokens stand when every sequence is padded to whole chunks. Chunks are numbered by step, then by
// sequence, the longest sequence first, so that the sequences alive at a step are a prefix.
struct ChunkPlan {
  std::vector<int64_t> order;    // sequences by falling chunk count
  std::vector<int64_t> rank;     // inverse of order
  std::vector<int64_t> active;   // sequences alive at each step
  std::vector<int64_t> gather;   // [M * C] token of each padded place, T for padding
  std::vector<int64_t> scatter;  // [T] padded place of each token
};

ChunkPlan plan_chunks(const Tensor& cu_seqlens) {
  const int64_t n = cu_seqlens.numel() - 1;
  const int64_t* cu = cu_seqlens.const_data_ptr<int64_t>();
  const auto chunks = [&](int64_t i) { return (cu[i + 1] - cu[i] + kChunk - 1) / kChunk; };
  ChunkPlan plan;
  plan.order.resize(n);
  std::iota(plan.order.begin(), plan.order.end(), 0);
  std::stable_sort(plan.order.begin(), plan.order.end(),
                   [&](int64_t a, int64_t b) { return chunks(a) > chunks(b); });
  plan.rank.resize(n);
  for (int64_t i = 0; i < n; ++i) plan.rank[plan.order[i]] = i;
  plan.scatter.resize(cu[n]);
  for (int64_t step = 0; n > 0 && step < chunks(plan.order[0]); ++step) {
    int64_t alive = 0;
    for (; alive < n && chunks(plan.order[alive]) > step; ++alive) {
      const int64_t begin = cu[plan.order[alive]] + step * kChunk;
      for (int64_t t = begin; t < begin + kChunk; ++t) {
        const bool real = t < cu[plan.order[alive] + 1];
        if (real) plan.scatter[t] = static_cast<int64_t>(plan.gather.size());
        plan.gather.push_back(real ? t : cu[n]);
      }
    }
    plan.active.push_back(alive);
  }
  return plan;
}

Tensor index_tensor(const std::vector<int64_t>& values, const at::Device& device) {
  return at::tensor(at::ArrayRef<int64_t>(values), at::kLong).to(device);
}

// x [T, H, ...] -> [M, H, C, ...] with zeros as padding.
Tensor to_chunks(const Tensor& x, const Tensor& gather) {
  auto row = x.sizes().vec();
  row[0] = 1;
  const Tensor padded = at::cat({x, at::zeros(row, x.options())}).index_select(0, gather);
  auto shape = x.sizes().vec();
  shape[0] = kChunk;
  shape.insert(shape.begin(), gather.numel() / kChunk);
  return padded.view(shape).transpose(1, 2).contiguous();
}

// X_ij = sum_c a_ic k_jc exp(G_ic - G_jc) for j <= i, 0 above the diagonal. Every exponent is taken from the
// start of the row's tile, so all factors but those of the diagonal tile are at most 1; the diagonal tile is
// multiplied out only if the gate is bounded, else its exponents are subtracted pair by pair.
Tensor decayed_products(const Tensor& a, const Tensor& k, const Tensor& G, bool bounded) {
  std::vector<Tensor> rows;
  const Tensor upper = at::ones({kTile, kTile}, k.options().dtype(at::kBool)).triu(1);
  for (int64_t at = 0; at < kChunk; at += kTile) {
    const Tensor G_tile = G.narrow(2, at, kTile);
    const Tensor k_tile = k.narrow(2, at, kTile);
    const Tensor anchor = at > 0 ? G.narrow(2, at - 1, 1) : at::zeros_like(G.narrow(2, 0, 1));
    const Tensor left = a.narrow(2, at, kTile) * at::exp(G_tile - anchor);
    std::vector<Tensor> parts;
    if (at > 0) {
      const Tensor before = k.narrow(2, 0, at) * at::exp(anchor - G.narrow(2, 0, at));
      parts.push_back(at::matmul(left, before.transpose(-1, -2)));
    }
    if (bounded) {
      const Tensor right = k_tile * at::exp(anchor - G_tile);
      parts.push_back(at::matmul(left, right.transpose(-1, -2)).masked_fill(upper, 0));
    } else {
      const Tensor exponent = (G_tile.unsqueeze(3) - G_tile.unsqueeze(2))
                                  .masked_fill(upper.unsqueeze(-1), -std::numeric_limits<double>::infinity());
      parts.push_back(
          (a.narrow(2, at, kTile).unsqueeze(3) * k_tile.unsqueeze(2) * at::exp(exponent)).sum(-1));
    }
    auto zeros = a.sizes().vec();
    zeros[2] = kTile;
    zeros[3] = kChunk - at - kTile;
    parts.push_back(at::zeros(zeros, a.options()));
    rows.push_back(at::cat(parts, 3));
  }
  return at::cat(rows, 2);
}

}  // namespace

KdaTokens kda_tokens(const KdaArgs& args) {
  const auto type = compute_type(args);
  const double scale = 1.0 / std::sqrt(static_cast<double>(args.q.size(2)));
  const Tensor z = args.z.to(type) + args.dt_bias.to(type);
  const Tensor rate = at::exp(args.A_log.to(type)).unsqueeze(-1);
  KdaTokens out;
  out.q = l2_normalize(args.q.to(type)) * scale;
  out.k = l2_normalize(args.k.to(type));
  out.v = args.v.to(type);
  out.g = args.gate_bound < 0 ? at::sigmoid(rate * z) * args.gate_bound
                              : -rate * at::softplus(z, /*beta=*/1, /*threshold=*/40);
  out.beta = at::sigmoid(args.b.to(type));
  return out;
}

std::tuple<Tensor, Tensor> kda_recurrence_ref(const KdaArgs& args) {
  const KdaTokens x = kda_tokens(args);
  const int64_t n = args.cu_seqlens.numel() - 1;
  const int64_t* cu = args.cu_seqlens.const_data_ptr<int64_t>();
  const Tensor initial = initial_or_zeros(args, n, compute_type(args));
  const Tensor alpha = at::exp(x.g);
  std::vector<Tensor> outputs, states;
  for (int64_t i = 0; i < n; ++i) {
    Tensor S = initial[i];  // [H, K, V]
    for (int64_t t = cu[i]; t < cu[i + 1]; ++t) {
      const Tensor k = x.k[t].unsqueeze(-1);
      S = S * alpha[t].unsqueeze(-1);
      const Tensor error = x.v[t] - (S * k).sum(1);
      S = S + k * (x.beta[t].unsqueeze(-1) * error).unsqueeze(1);
      outputs.push_back((S * x.q[t].unsqueeze(-1)).sum(1));
    }
    states.push_back(S);
  }
  const Tensor o = outputs.empty() ? at::zeros_like(x.v) : at::stack(outputs);
  return {o.to(args.v.scalar_type()), states.empty() ? initial.clone() : at::stack(states)};
}

// Per chunk, with G the running sum of g and Gamma = exp(G) (arXiv:2510.26692, the WY form):
//   L_ij = beta_i sum_c k_ic k_jc exp(G_ic - G_jc), i > j;  T = (I + L)^-1 Diag(beta)
//   V~ = T V - T (K Gamma) S;  O = (Q Gamma) S + A V~;  S' = Diag(Gamma_C) S + (K exp(G_C - G))^T V~
std::tuple<Tensor, Tensor> kda_chunk_ref(const KdaArgs& args) {
  const KdaTokens x = kda_tokens(args);
  const auto type = compute_type(args);
  const ChunkPlan plan = plan_chunks(args.cu_seqlens);
  const auto device = x.v.device();
  const int64_t n = args.cu_seqlens.numel() - 1;
  const Tensor initial = initial_or_zeros(args, n, type);
  if (x.v.size(0) == 0) {
    // Keeps the graph: the initial state is handed on.
    return {args.v.clone(), args.initial_state.has_value() ? initial.clone() : initial};
  }
  const bool bounded = args.gate_bound < 0 && -args.gate_bound * kTile <= kMaxDecay;
  const Tensor gather = index_tensor(plan.gather, device);
  const Tensor q = to_chunks(x.q, gather), k = to_chunks(x.k, gather), v = to_chunks(x.v, gather);
  const Tensor beta = to_chunks(x.beta, gather).unsqueeze(-1);  // [M, H, C, 1]
  const Tensor G = to_chunks(x.g, gather).cumsum(2);
  const Tensor G_last = G.narrow(2, kChunk - 1, 1);
  const Tensor L = (beta * decayed_products(k, k, G, bounded)).tril(-1);
  const Tensor A = decayed_products(q, k, G, bounded);
  const Tensor eye = at::eye(kChunk, k.options());
  const Tensor T = at::linalg_solve_triangular(L + eye, eye * beta, /*upper=*/false, /*left=*/true,
                                               /*unitriangular=*/true);
  const Tensor Gamma = at::exp(G);
  const Tensor W = at::matmul(T, k * Gamma), U = at::matmul(T, v);
  const Tensor q_decayed = q * Gamma;
  const Tensor k_rest_t = (k * at::exp(G_last - G)).transpose(-1, -2);
  const Tensor decay = at::exp(G_last).transpose(-1, -2);  // [M, H, K, 1]

  Tensor S = initial.index_select(0, index_tensor(plan.order, device));
  std::vector<Tensor> outputs, finished;
  int64_t first = 0;
  for (const int64_t active : plan.active) {
    if (active < S.size(0)) {
      finished.push_back(S.narrow(0, active, S.size(0) - active));
      S = S.narrow(0, 0, active);
    }
    const auto here = [&](const Tensor& y) { return y.narrow(0, first, active); };
    const Tensor V_new = here(U) - at::matmul(here(W), S);
    outputs.push_back(at::matmul(here(q_decayed), S) + at::matmul(here(A), V_new));
    S = here(decay) * S + at::matmul(here(k_rest_t), V_new);
    first += active;
  }
  finished.push_back(S);
  std::reverse(finished.begin(), finished.end());
  const Tensor o = at::cat(outputs)
                       .transpose(1, 2)  // [M, C, H, V]
                       .reshape({-1, v.size(1), v.size(3)})
                       .index_select(0, index_tensor(plan.scatter, device));
  const Tensor final_state = at::cat(finished).index_select(0, index_tensor(plan.rank, device));
  return {o.to(args.v.scalar_type()), final_state};
}

std::vector<Tensor> kda_chunk_ref_grads(const std::optional<Tensor>& grad_o,
                                        const std::optional<Tensor>& grad_final_state, const KdaArgs& x) {
  std::vector<Tensor> inputs = {x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b};
  if (x.initial_state.has_value()) inputs.push_back(*x.initial_state);
  auto grads = composition_grads(inputs, {grad_o, grad_final_state}, [&](const std::vector<Tensor>& in) {
    KdaArgs leaves{in[0], in[1], in[2], in[3], in[4], in[5], in[6], x.gate_bound, std::nullopt, x.cu_seqlens};
    if (in.size() > 7) leaves.initial_state = in[7];
    const auto [o, final_state] = kda_chunk_ref(leaves);
    return std::vector<Tensor>{o, final_state};
  });
  grads.resize(8);
  return grads;
}

Tensor kda_step_ref(const KdaArgs& args, Tensor& state, const std::optional<Tensor>& slots) {
  if (slots.has_value()) {
    const Tensor kept = at::nonzero(slots->ge(0)).squeeze(1);  // rows
    const Tensor rows = kept.to(state.device()), at = slots->index_select(0, kept).to(state.device());
    const auto sizes = state.sizes();
    Tensor own = at::zeros({slots->size(0), sizes[1], sizes[2], sizes[3]}, state.options());
    own.index_copy_(0, rows, state.index_select(0, at));
    const Tensor o = kda_step_ref(args, own, std::nullopt);
    state.index_copy_(0, at, own.index_select(0, rows));
    return o;
  }
  const KdaTokens x = kda_tokens(args);
  const Tensor k = x.k.unsqueeze(-1);
  const Tensor decayed = state.to(x.v.scalar_type()) * at::exp(x.g).unsqueeze(-1);
  const Tensor error = x.beta.unsqueeze(-1) * (x.v - (decayed * k).sum(2));
  const Tensor S = decayed + k * error.unsqueeze(2);
  state.copy_(S);
  return (S * x.q.unsqueeze(-1)).sum(2).to(args.v.scalar_type());
}

}  // namespace godwit::ops::ref
