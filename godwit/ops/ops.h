// Every op of Godwit, one line of doc each. An op is `torch.ops.godwit.<name>`, differentiable, on CPU and
// CUDA.
//
// Packed layout: the T tokens of N sequences (documents) stand one after another in the first dimension.
// cu_seqlens is an int64 tensor [N+1] on the CPU with the offsets, cu[0] = 0, cu[N] = T; empty sequences are
// allowed. Nothing crosses a boundary. Legend: T tokens, N sequences, H heads, K key width, V value width, D
// model width, E experts, L latent width, I expert inner width, k experts per token. Wrong shapes, dtypes or
// devices throw c10::Error that names the argument, what was expected and what was given.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace godwit::ops {

using at::Tensor;

// Causal depthwise convolution, then SiLU. x [T, C], weight [C, W] fp32 (y_t = sum_j weight[j] x_{t-W+1+j}),
// initial_state [N, C, W-1] (the last W-1 inputs, oldest first) or none = zeros. Returns y [T, C] in x's
// dtype and the final state.
std::tuple<Tensor, Tensor> short_conv(const Tensor& x, const Tensor& weight,
                                      const std::optional<Tensor>& initial_state, const Tensor& cu_seqlens);

// Kimi Delta Attention (arXiv:2607.24653 eq. 1 to 6), exact chunked form. q, k [T, H, K] and v [T, H, V]
// after convolution and SiLU, not normalised: the op applies the L2 norm (eps 1e-6 on the sum of squares) and
// K^-1/2 on q. z [T, H, K] gate logits before dt_bias, A_log [H] fp32, dt_bias [H, K] fp32, b [T, H] beta
// logits (beta = sigmoid(b)). Log-decay g = gate_bound * sigmoid(exp(A_log) * (z + dt_bias)) if gate_bound <
// 0, else -exp(A_log) * softplus(z + dt_bias). initial_state [N, H, K, V] fp32 or bf16, or none = zeros.
// Returns o [T, H, V] in v's dtype and final_state [N, H, K, V] in initial_state's, fp32 without one.
std::tuple<Tensor, Tensor> kda_chunk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                     const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                                     double gate_bound, const std::optional<Tensor>& initial_state,
                                     const Tensor& cu_seqlens);

// kda_chunk without gradient, and the states [P, H, K, V] after the tokens before `at`, int64 [P] on the CPU,
// strictly increasing offsets into the packed tokens (1 to T; cu_seqlens[n+1] is sequence n's final state).
// On Hopper they cost their writes where each is a multiple of 16 tokens from the start of its sequence, or
// its end.
std::tuple<Tensor, Tensor, Tensor> kda_chunk_states(const Tensor& q, const Tensor& k, const Tensor& v,
                                                    const Tensor& z, const Tensor& A_log,
                                                    const Tensor& dt_bias, const Tensor& b, double gate_bound,
                                                    const std::optional<Tensor>& initial_state,
                                                    const Tensor& cu_seqlens, const Tensor& at);

// The same recurrence, one token for each of N = T sequences. `state` [N, H, K, V] fp32 or bf16 is updated in
// place. With `slots` (int64 [N] on the CPU, distinct where not negative) state is [S, H, K, V] and row n
// uses state[slots[n]]; a negative slot reads zeros and writes nothing. No gradient.
Tensor kda_step(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
                const Tensor& dt_bias, const Tensor& b, double gate_bound, Tensor& state,
                const std::optional<Tensor>& slots = std::nullopt);

// The next M = `tokens` tokens of a whole KDA layer for each of N sequences, between its projections: short
// convolutions, kda_step, rms_norm_gated, as one kernel where there is one. All states are updated in place,
// no gradient. With `slots` the states have S rows and sequence n owns row slots[n]; a negative slot reads
// and writes no state and its outputs are zero. `keep` says after how many of the M tokens a sequence's
// states are stored, 0: not at all; default all. A verifier of drafts computes all M outputs with keep = 0,
// and runs again with what it accepted. slots (distinct where not negative) and keep are on the device of the
// tokens, so that a captured graph can be replayed with others.
struct KdaDecodeArgs {
  Tensor q, k, v, z, gate;        // [N*M, H*K] projections, before convolution; row n * M + m
  Tensor b;                       // [N*M, H]
  Tensor q_conv, k_conv, v_conv;  // [H*K, W]
  Tensor A_log, dt_bias, o_norm;  // [H], [H, K], [K]
  double gate_bound = 0, norm_eps = 0;
  Tensor conv_q, conv_k, conv_v;      // [S, H*K, W-1]
  Tensor state;                       // [S, H, K, K] fp32 or bf16
  std::optional<Tensor> slots, keep;  // int32 [N]; without slots S = N
  int64_t tokens = 1;
};
Tensor kda_decode(const KdaDecodeArgs& args);

// y = x * rsqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);

// y = rms_norm(x, weight) * sigmoid(gate); x, gate [..., V], weight [V] (KDA's output norm and gate).
Tensor rms_norm_gated(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps);

// y = x weight^T; x [..., K], weight [N, K]. On the CPU in fp32 a row of y depends on its row of x only, bit
// for bit.
Tensor linear(const Tensor& x, const Tensor& weight);

// Rows of weights as int8: w [..., K] about values [..., K] * scale [...], scale = max |w| / 127 of the row.
std::tuple<Tensor, Tensor> quantize_int8(const Tensor& w);

// y = x (values * scale)^T; x [..., K], values int8 [N, K], scale [N] fp32. On the CPU the weights become
// fp32 in registers: the bits of linear with that matrix in fp32. No gradient.
Tensor linear_int8(const Tensor& x, const Tensor& values, const Tensor& scale);

// linear with a weight a head: y[:, h] = x[:, h] weight[h]^T; x [T, H, K], weight [H, O, K], y [T, H, O].
Tensor linear_heads(const Tensor& x, const Tensor& weight);

// Gated linear unit of the FFNs: act(g) * lin(u), elementwise. beta_gate > 0: act(g) = beta_gate
// tanh(g/beta_gate) sigmoid(g) (SiTU, arXiv:2607.24653 eq. 12), 0: g sigmoid(g). beta_up > 0: lin(u) =
// beta_up tanh(u/beta_up), 0: u.
Tensor glu(const Tensor& g, const Tensor& u, double beta_gate, double beta_up);

// y = x sigmoid(g), elementwise, g of x's shape.
Tensor sigmoid_gate(const Tensor& x, const Tensor& g);

// Attention Residuals mix (arXiv:2607.24653 eq. 8 to 10): sources S tensors [T, D]; score_s = sum_c
// norm_weight_c query_c v_sc rsqrt(mean v_s^2 + eps); returns sum_s softmax(score)_s v_s [T, D]. Everything
// in fp32 inside.
Tensor attn_res_mix(const std::vector<Tensor>& sources, const Tensor& norm_weight, const Tensor& query,
                    double eps);

// Router: scores s = sigmoid(logits), logits [T, E] fp32; experts = top-k of s + bias (bias [E] fp32, no
// gradient; ties to the lower index); weights p_i = s_i / (sum of the k chosen s + 1e-20) if renormalize (and
// k > 1), times scale. groups > 1: a group's score is the sum of its two largest biased scores, only the best
// topk_groups groups are chosen from. Returns weights [T, k] fp32 (differentiable in logits), experts
// [T, k] int32 (best first), scores [T, E] fp32 (detached), cutoff [T] fp32: the (k+1)-th biased score (-inf
// if k = E).
std::tuple<Tensor, Tensor, Tensor, Tensor> moe_router(const Tensor& logits, const Tensor& bias, int64_t k,
                                                      bool renormalize, double scale, int64_t groups,
                                                      int64_t topk_groups);

// Dropless routed experts: u_t = sum_i weights_ti W2_e (glu(W1_e z_t, W3_e z_t)), e = experts_ti. z [T, L],
// w1, w3 [E, I, L], w2 [E, L, I]. Returns u [T, L] in z's dtype. Gradients for z, weights, w1, w3, w2.
Tensor moe_experts(const Tensor& z, const Tensor& experts, const Tensor& weights, const Tensor& w1,
                   const Tensor& w3, const Tensor& w2, double beta_gate, double beta_up);

// moe_experts with packed weights, for inference; no gradient. Either int8, w1, w3 [E, I, L], w2 [E, L, I]
// with a scale a row in fp32 (s1, s3 [E, I], s2 [E, L]), or MXFP4 as uint8 (io/mxfp4.h), w1, w3 [E, I, L/2],
// w2 [E, L, I/2] with scales [E, I, L/32], [E, L, I/32]. On the CPU the bits of moe_experts with those
// weights in fp32.
struct QuantizedExperts {
  Tensor w1, s1, w3, s3, w2, s2;
};
Tensor moe_experts_quantized(const Tensor& z, const Tensor& experts, const Tensor& weights,
                             const QuantizedExperts& w, double beta_gate, double beta_up);

// Quantile Balancing statistics (arXiv:2607.24653 section 2.3.3, App. D): adds the histogram of required bias
// r = cutoff_t
// - s_tj over `counts.size(1)` uniform bins of [range_min, range_max] to counts [E, B] int64, in place;
// values outside count in the end bins.
void qb_histogram(const Tensor& scores, const Tensor& cutoff, double range_min, double range_max,
                  Tensor& counts);

// Causal attention over packed sequences. q [Tq, H, Dk], k [Tk, H, Dk], v [Tk, H, Dv]; cu_q, cu_k int64 [N+1]
// on the CPU. Sequence n has cu_k length >= cu_q length; its queries are the last ones (bottom-right causal).
// window > 0: a query sees itself and the window-1 keys before it.
// In fp32 on the CPU, widths multiples of 16: a row's bits depend on nothing but its query and what it sees.
Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
                 double scale, int64_t window);

// Multi-head latent attention, absorbed, for one query of each of N sequences over paged latents. q [N, H,
// R+P] (W_UK folded in), pages [pages, page rows, R+P], table int32 [N, M] on the CPU: the page of rows m *
// page rows and on of sequence n; lengths int64 [N] on the CPU: rows it sees, >= 1, the newest token's among
// them. Beside q on a GPU both may lie there too: then nothing is checked, and a launch does not depend on
// them. window > 0: only the last `window` rows. Returns softmax(q . row * scale) over the rows' first R =
// rank entries, [N, H, R] in q's dtype. On the CPU the bits of a sequence depend on nothing but its query and
// rows. No gradient.
Tensor mla_decode(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                  int64_t rank, double scale, int64_t window);

// Chunked cross-entropy that never holds all logits. x [T, D], head [V, D], targets [T] int64 (-100 =
// ignored), weights [T] fp32. Returns (sum_t weights_t nll_t, nll [T] fp32 detached, 0 where ignored).
std::tuple<Tensor, Tensor> linear_cross_entropy(const Tensor& x, const Tensor& head, const Tensor& targets,
                                                const Tensor& weights);

// Newton-Schulz on each matrix of batch [n, r, c], in place, no gradient. With X_0 = M / (|M|_F + 1e-7):
//   X <- a X + (b A + c A^2) X,  A = X X^T,  (a, b, c) = (3.4445, -4.7750, 2.0315)   (Jordan et al. 2024)
// `steps` times; where r > c the same from the right. The singular values end in about [0.7, 1.2]; zero stays
// zero. `compute`: the products' dtype; by default the batch's own, but bf16 for fp32 batches on a GPU, as
// Muon is run everywhere (the iteration corrects its own rounding; the norm stays fp32).
void newton_schulz_(Tensor& batch, int64_t steps, std::optional<at::ScalarType> compute = std::nullopt);

// Muon around Newton-Schulz, elementwise, in place, no gradient; all of one shape and device.
//   muon_momentum_  g = grad_scale grad;  momentum <- g + mu momentum;  update <- g + mu momentum (Nesterov)
//                   or momentum
//   muon_weight_    weight <- keep weight - rate update;  copy <- weight, in its dtype
void muon_momentum_(Tensor& momentum, const Tensor& grad, Tensor& update, double grad_scale, double mu,
                    bool nesterov);
void muon_weight_(Tensor& weight, const Tensor& update, const std::optional<Tensor>& copy, double keep,
                  double rate);

}  // namespace godwit::ops
