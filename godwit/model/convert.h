// Conversion of checkpoints, tensor by tensor: Kimi K3's released layout, Kimi-Linear's, and a training run's
// checkpoint, in and (but for the last) out. Memory stays at one shard's header and a few buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "godwit/model/layout.h"

namespace godwit {

enum class ConvertDtype { kAsStored, kBf16, kF32, kMxfp4 };

struct ConvertOptions {
  // kMxfp4: the routed experts packed (those that are already keep their bytes), the rest bf16.
  ConvertDtype dtype = ConvertDtype::kAsStored;
  std::optional<std::string> model_type = {};  // "kimi_k3" or "kimi_linear" for another layout than IN's
  // A checkpoint of the same model with MXFP4 experts, whose scales are taken instead of new ones.
  std::optional<std::string> scales_from = {};
  uint64_t shard_bytes = kShardBytes;
  std::function<void(uint64_t done, uint64_t total)> progress = {};  // bytes written
};

struct ConvertSummary {
  int64_t tensors_in = 0, tensors_out = 0;
  int64_t files = 0;
  uint64_t bytes = 0;
  bool packed = false;
  int64_t vision = 0;                           // of the vision tower and projector
  int64_t left_out = 0;                         // the same where the layout has no place for them
  std::vector<std::string> keys_left_out = {};  // of config.json, likewise
};

// OUT is a model directory with config.json and whatever lay beside IN's weights. It appears when it is
// complete; an existing one is refused, and so are values that are not finite or would not be in OUT.
ConvertSummary convert_checkpoint(const std::string& in, const std::string& out,
                                  const ConvertOptions& options);

}  // namespace godwit
