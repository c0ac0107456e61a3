// What a model costs, from its configuration alone: parameters, checkpoint bytes, state, arithmetic, memory
// traffic. Nothing is allocated.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "godwit/model/config.h"

namespace godwit {

// Counted as a checkpoint stores them (A_log zero-padded to a multiple of 128 in the K3 layout).
struct ParameterCount {
  int64_t total = 0;
  int64_t vision = 0;  // tower and projector are both in `total`; this is the tower
  int64_t active = 0;  // read for one text token: k experts a MoE layer; the embedding is a look-up, not read
  int64_t active_without_head = 0;  // the same without lm_head
  std::map<std::string, int64_t> by_module;
  std::map<std::string, int64_t> active_by_module;  // sums to `active`
};

struct StateBytes {
  int64_t kda_fp32 = 0;            // recurrent state of all KDA layers, one sequence
  int64_t conv = 0;                // convolution tails of all KDA layers in bf16, one sequence
  int64_t mla_bf16_per_token = 0;  // latent rows of all MLA layers

  // One sequence of `context` tokens.
  int64_t at(int64_t context) const { return kda_fp32 + conv + mla_bf16_per_token * context; }
};

// Multiply-accumulates counted as two operations. Attention's part depends on the context.
struct FlopsPerToken {
  double train = 0;  // forward and backward (3 x forward) of the mean token of a sequence of `context` tokens
  double prefill = 0;  // forward of the mean token of a prompt of `context` tokens
  double decode = 0;   // one token after `context` cached ones, absorbed MLA
};

// Memory traffic of one decode step over its tokens (one a sequence): weights as the checkpoint stores them,
// each read once a step; an expert is read when any of the batch's tokens chose it (even routing).
struct DecodeBytes {
  double routed_experts = 0;
  double other_weights = 0;
  double kda_state = 0;   // fp32, read and written
  double conv_state = 0;  // bf16, read and written
  double mla_cache = 0;   // bf16: `context` rows read, one written
  double total() const { return routed_experts + other_weights + kda_state + conv_state + mla_cache; }
};

struct Plan {
  ParameterCount parameters;
  StateBytes state;
  FlopsPerToken flops;
  DecodeBytes decode_bytes;      // a token
  int64_t checkpoint_bytes = 0;  // released layout: routed experts MXFP4 where the K3 model's dtype is bf16
  std::map<std::string, int64_t> checkpoint_bytes_by_dtype;  // mxfp4 (with its scales), bf16, f32
  int64_t context = 0;
  int64_t decode_batch = 0;
};

// `decode_batch`: sequences that a decode step serves, each with `context` cached tokens.
Plan make_plan(const ModelConfig& config, int64_t context, int64_t decode_batch = 1);

}  // namespace godwit
