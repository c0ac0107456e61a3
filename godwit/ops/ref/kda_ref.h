// Kimi Delta Attention in plain ATen: any floating dtype, any device, differentiable by autograd.
//   kda_recurrence_ref  token by token, the definition; the tests' oracle in fp64
//   kda_chunk_ref       the chunked form; the op's path where no kernel is linked in, and for fp64 inputs
//   kda_step_ref        one token a sequence, state in place
// Legend as in ops.h: T tokens, N sequences, H heads, K key width, V value width, C chunk, M chunks of all
// sequences. Computes in fp64 if v is fp64, else in fp32.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace godwit::ops {

// The arguments of kda_chunk (ops.h), which all forms share.
struct KdaArgs {
  at::Tensor q, k, v, z, A_log, dt_bias, b;
  double gate_bound = 0;
  std::optional<at::Tensor> initial_state;
  at::Tensor cu_seqlens;
};

namespace ref {

// After the elementwise part. q, k [T, H, K] normalised, q also times K^-1/2; v [T, H, V]; g [T, H, K] <= 0
// log-decay; beta [T, H].
struct KdaTokens {
  at::Tensor q, k, v, g, beta;
};
KdaTokens kda_tokens(const KdaArgs& args);

std::tuple<at::Tensor, at::Tensor> kda_recurrence_ref(const KdaArgs& args);
std::tuple<at::Tensor, at::Tensor> kda_chunk_ref(const KdaArgs& args);

// Gradients of q, k, v, z, A_log, dt_bias, b, initial_state (undefined if there is none) by autograd through
// kda_chunk_ref. An absent output gradient counts as zero.
std::vector<at::Tensor> kda_chunk_ref_grads(const std::optional<at::Tensor>& grad_o,
                                            const std::optional<at::Tensor>& grad_final_state,
                                            const KdaArgs& args);

// `args` without initial_state and cu_seqlens; state [N, H, K, V], with slots [S, H, K, V], is updated.
at::Tensor kda_step_ref(const KdaArgs& args, at::Tensor& state, const std::optional<at::Tensor>& slots);

}  // namespace ref
}  // namespace godwit::ops
