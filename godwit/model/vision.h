// MoonViT-V2 and its projector (Kimi K3 report, arXiv:2607.24653; the tower of arXiv:2602.02276 made anew):
// patches of pictures and video frames to vectors that stand in the text. Pictures of any sizes lie one after
// another, without padding; none sees another.
//
// Legend: P patches, p their side in pixels, W tower width, H heads, d head width, m = merge height x width,
// D text width. One block: x += Wo Attn(RMSNorm(x));  x += fc1 GELU_tanh(fc0 RMSNorm(x)).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "godwit/model/weights.h"

namespace godwit {

// One item: a picture, or a few frames of a video that become vectors together. Sides in patches.
struct VisionGrid {
  int64_t frames = 1;
  int64_t rows = 0;
  int64_t columns = 0;

  int64_t in_frame() const { return rows * columns; }
  int64_t patches() const { return frames * rows * columns; }
  bool operator==(const VisionGrid&) const = default;
};

struct VisionInput {
  at::Tensor patches;  // [P, 3 p p], channels first in a patch; row by row, frame by frame, item by item
  std::vector<VisionGrid> grids;
};

// The vectors of an item: its frames are averaged, m patches joined.
int64_t vision_tokens(const VisionConfig& config, const VisionGrid& grid);

// Throws Error, naming `where`, when the tower cannot take such an item.
void check_grid(const VisionConfig& config, const VisionGrid& grid, const std::string& where);

// [sum of vision_tokens, D], differentiable. The patches may lie on any device and be of any floating type.
at::Tensor vision_forward(const ModelConfig& config, const VisionWeights& weights, const VisionInput& input);

}  // namespace godwit
