#include "godwit/train/held_out.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numbers>

#include "godwit/base/check.h"
#include "godwit/data/eval_reader.h"

namespace godwit {
namespace {

// Bytes [P, 3, p p] to their values, [P, 3 p p] on `device`, where they go as bytes.
at::Tensor patches_on(const data::PackedBatch& batch, int64_t patches, at::Device device) {
  const at::Tensor bytes = at::from_blob(const_cast<uint8_t*>(batch.pixels.data()),
                                         {static_cast<int64_t>(batch.pixels.size())}, at::kByte);
  const at::Tensor values =
      at::from_blob(const_cast<float*>(batch.values[0].data()), {3 * 256}, at::kFloat).to(device);
  const at::Tensor channel = 256 * at::arange(3, at::TensorOptions(device).dtype(at::kInt)).unsqueeze(1);
  const at::Tensor places = bytes.to(device).view({patches, 3, -1}).to(at::kInt) + channel;
  return values.index_select(0, places.view({-1})).view({patches, -1});
}

}  // namespace

DeviceBatch to_device(const data::PackedBatch& batch, at::Device device) {
  DeviceBatch out{
      .packed = {.ids = at::tensor(batch.ids).to(device), .cu_seqlens = at::tensor(batch.cu_seqlens)},
      .targets = at::tensor(batch.targets).to(device)};
  if (batch.media.empty()) return out;
  int64_t patches = 0;
  for (const data::MediaPiece& piece : batch.media) {
    out.pictures.grids.push_back({.frames = piece.frames, .rows = piece.rows, .columns = piece.columns});
    patches += out.pictures.grids.back().patches();
  }
  out.pictures.patches = patches_on(batch, patches, device);
  out.media = batch.media;
  return out;
}

void encode_pictures(const ModelConfig& config, const ModelWeights& weights, DeviceBatch& batch) {
  if (batch.media.empty()) return;
  check(weights.vision.has_value(), "the data have pictures, the model has no vision tower");
  const at::Tensor all = vision_forward(config, *weights.vision, batch.pictures);
  std::vector<int64_t> used;  // the ends of sequences cut some pictures
  int64_t begin = 0;
  for (size_t i = 0; i < batch.media.size(); ++i) {
    for (int64_t v = 0; v < batch.media[i].count; ++v) used.push_back(begin + batch.media[i].first + v);
    begin += vision_tokens(*config.vision, batch.pictures.grids[i]);
  }
  const bool whole = static_cast<int64_t>(used.size()) == begin;
  batch.packed.media = whole ? all : all.index_select(0, at::tensor(used, at::kLong).to(all.device()));
}

HeldOutLoss held_out_loss(const ModelConfig& config, const ModelWeights& weights,
                          const std::shared_ptr<const data::TokenDataset>& dataset, int64_t context,
                          int64_t max_tokens, at::Device device,
                          const std::function<void(int64_t, int64_t)>& progress) {
  const data::EvalReader reader(dataset, context);
  check(reader.targets() > 0, "{}: no held-out token to measure", dataset->path().string());
  const int64_t all = reader.batches();
  const int64_t wanted =
      max_tokens > 0 ? std::clamp<int64_t>((max_tokens + context - 1) / context, 1, all) : all;
  LossByPosition sums;
  for (int64_t i = 0; i < wanted; ++i) {
    const at::NoGradGuard no_grad;
    DeviceBatch batch = to_device(reader.batch(i * all / wanted), device);  // spread over the whole text
    encode_pictures(config, weights, batch);
    const at::Tensor targets = batch.targets.to(at::kCPU);
    sums.add(token_losses(config, weights, batch.packed, targets), targets, batch.packed.cu_seqlens);
    if (progress) progress(i + 1, wanted);
  }
  const double tokens = static_cast<double>(sums.tokens());
  const double bytes =
      static_cast<double>(reader.text_bytes()) * tokens / static_cast<double>(reader.targets());
  return {.context = context,
          .tokens = sums.tokens(),
          .nats_per_token = sums.total_nats() / tokens,
          .bits_per_byte = sums.total_nats() / std::numbers::ln2 / bytes,
          .by_position = sums.buckets()};
}

}  // namespace godwit
