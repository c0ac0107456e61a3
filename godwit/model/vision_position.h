// Where a patch stands, for the vision tower: the learned grid at another size, the rotation, the frames.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include "godwit/model/vision.h"

namespace godwit {

// The position grid pos_emb [rows, columns, W] at the size of a frame: [in_frame, W], in pos_emb's type.
// Bilinear or bicubic (a = -0.75) between the centres of cells, as torch's interpolate without align_corners;
// both are a matrix for each axis. The grid's own size leaves it as it is.
at::Tensor position_at_size(const VisionConfig& config, const at::Tensor& pos_emb, const VisionGrid& grid);

// The same as one matrix, [in_frame, rows * columns] fp64 on the CPU: what each cell gives to each patch.
at::Tensor position_weights(const VisionConfig& config, const VisionGrid& grid);

// [frames, W] fp64: sin | cos of frame * 10000^(-2 i / W), on the CPU.
at::Tensor frame_embedding(const VisionConfig& config, int64_t frames);

// 2-D rotation of one frame's queries and keys, [in_frame, d / 2, 2] of (cos, sin) with these options: pair
// 2i turns by the column, pair 2i + 1 by the row, times 10000^(-4 i / d); computed in fp64.
at::Tensor rotation_of(const VisionConfig& config, const VisionGrid& grid, const at::TensorOptions& options);

}  // namespace godwit
