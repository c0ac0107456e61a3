// What a decoder layer keeps for its backward, counted in values a token, from the configuration alone. One
// list serves the cluster plan and the forecast of our own trainer.
#pragma once

#include <cstdint>

#include "godwit/model/config.h"

namespace godwit {

// Values a token, by the dtype they are kept in.
struct KeptValues {
  double model = 0;  // in the model's dtype
  double fp32 = 0;   // whatever the model's dtype: scores of the router, states of KDA
  double bytes(double model_bytes) const { return model * model_bytes + fp32 * 4.0; }
  KeptValues& operator+=(const KeptValues& o) {
    model += o.model;
    fp32 += o.fp32;
    return *this;
  }
};

// Token mixer and channel mixer of one layer, residual stream and norms apart; the experts' own rows are not
// in it (they are kept, computed again or sent, which the caller knows).
KeptValues kept_by_token_mixer(const ModelConfig& config, int64_t layer);
KeptValues kept_by_channel_mixer(const ModelConfig& config, int64_t layer);

// The stream of one layer: a sum and a mix and a normalised copy before each of its two sub-layers, D each.
KeptValues kept_by_stream(const ModelConfig& config);

}  // namespace godwit
