// What a model costs, from its configuration alone: parameters, checkpoint bytes, state, arithmetic. Nothing
// is allocated.
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
  int64_t active =
      0;  // read for one token: k experts a MoE layer, one embedding row counted as the whole table is not
  int64_t active_without_head = 0;  // the same without lm_head
  std::map<std::string, int64_t> by_module;
};

struct StateBytes {
  int64_t kda_fp32 = 0;            // recurrent state of all KDA layers, one sequence
  int64_t conv = 0;                // convolution tails of all KDA layers in bf16, one sequence
  int64_t mla_bf16_per_token = 0;  // latent rows of all MLA layers
};

// Multiply-accumulates counted as two operations. Attention's part depends on the context.
struct FlopsPerToken {
  double train = 0;  // forward and backward (3 x forward) of the mean token of a sequence of `context` tokens
  double prefill = 0;  // forward of the mean token of a prompt of `context` tokens
  double decode = 0;   // one token after `context` cached ones, absorbed MLA
};

struct Plan {
  ParameterCount parameters;
  StateBytes state;
  FlopsPerToken flops;
  int64_t checkpoint_bytes =
      0;  // released layout: routed experts MXFP4 where the model's dtype is bf16, fp32 parameters in fp32
  int64_t context = 0;
};

Plan make_plan(const ModelConfig& config, int64_t context);

}  // namespace godwit
