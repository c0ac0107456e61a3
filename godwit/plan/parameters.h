// Sizes of a model's parameters and of what an optimiser keeps for them: the one walk that the cluster plan
// and the memory forecast of a training run share. Nothing is allocated.
#pragma once

#include <functional>

#include "godwit/model/config.h"
#include "godwit/model/weights.h"

namespace godwit {

struct SizedParam {
  const ParamInfo& info;
  double count;   // values
  int64_t layer;  // -1: the embedding, the last norm and mix, the head
  bool trained;   // by gradients; the router's bias is the balancer's
  bool muon;

  bool wide(bool bf16) const { return !bf16 || info.keep_fp32; }
  // Bytes, where the model's dtype is bf16 or fp32.
  double bytes(bool bf16) const { return count * (wide(bf16) ? 4.0 : 2.0); }
  // Of fp32 moments (Muon's one, AdamW's two) and the fp32 master of bf16 weights.
  double state_bytes(bool bf16) const {
    return trained ? count * ((muon ? 4.0 : 8.0) + (wide(bf16) ? 0.0 : 4.0)) : 0.0;
  }
};

void for_each_size(const ModelConfig& config, const std::function<void(const SizedParam&)>& visit);

}  // namespace godwit
