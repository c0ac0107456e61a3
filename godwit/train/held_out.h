// Loss on held-out text: nats a token, bits a byte, and by position in the window.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "godwit/data/dataset.h"
#include "godwit/data/packed_batch.h"
#include "godwit/model/evaluate.h"
#include "godwit/model/forward.h"
#include "godwit/model/vision.h"

namespace godwit {

struct HeldOutLoss {
  int64_t context = 0;
  int64_t tokens = 0;  // targets measured
  double nats_per_token = 0;
  double bits_per_byte = 0;  // of the text behind the measured tokens
  std::vector<LossByPosition::Bucket> by_position;
};

// Documents in windows of `context` tokens (data::EvalReader), at most about `max_tokens` of them (0: all).
// No gradients. `progress` gets (batches done, of).
HeldOutLoss held_out_loss(const ModelConfig& config, const ModelWeights& weights,
                          const std::shared_ptr<const data::TokenDataset>& dataset, int64_t context,
                          int64_t max_tokens, at::Device device,
                          const std::function<void(int64_t done, int64_t of)>& progress = {});

// Batch of the data library as tensors on `device`.
struct DeviceBatch {
  PackedBatch packed;
  at::Tensor targets;  // [T] int64, -100 where there is none
  VisionInput pictures = {};
  std::vector<data::MediaPiece> media = {};  // which of their vectors stand in the text
};
DeviceBatch to_device(const data::PackedBatch& batch, at::Device device);

// Runs the vision tower on the batch's pictures, if it has some: their vectors go into batch.packed.media,
// with gradients where those are enabled.
void encode_pictures(const ModelConfig& config, const ModelWeights& weights, DeviceBatch& batch);

}  // namespace godwit
