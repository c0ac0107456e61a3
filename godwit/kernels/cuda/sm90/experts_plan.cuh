// Where each token goes, on the device: the (token, slot) pairs sorted by expert, stable, every expert's rows
// padded to a multiple of 16, so that the products over rows (weight gradients) need no mask: pad rows are
// zeros. And the tiles of rows that the products take. Nothing here is known to the host, which needs only
// upper bounds.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "godwit/kernels/moe_experts.h"

namespace godwit::kernels::cuda::sm90 {

inline constexpr int kRowPad = 16;
inline constexpr int kTileRows = 176;  // the widest tile; accumulators and shared memory allow no more

// A tile of rows of one expert. Tiles of one expert stand together in the list.
struct RowTile {
  int expert;
  int begin;
  int rows;   // padding included
  int first;  // the expert's first tile in the list, and how many it has
  int count;
  int unused[3];
};

struct ExpertRange {
  int begin;
  int end;  // padding included
};

struct ExpertPlan {
  int tile_rows = kTileRows;  // the most a tile may have, a multiple of 8
  int64_t slots = 0;          // T k
  int64_t max_rows = 0;       // bounds
  int64_t max_tiles = 0;
  int blocks = 0;                 // of slots
  int* counts = nullptr;          // [blocks][E], then first rows
  int* slot_row = nullptr;        // [slots]
  int* row_slot = nullptr;        // [max_rows], -1 = padding
  int* totals = nullptr;          // rows, tiles
  RowTile* tiles = nullptr;       // [max_tiles]
  ExpertRange* ranges = nullptr;  // [E]
};

// Lays a plan out in `memory`, for its tile_rows; the returned bytes are what it takes (memory may be null to
// ask).
size_t layout_plan(const MoeShape& shape, void* memory, ExpertPlan* plan);
cudaError_t launch_plan(const ExpertPlan& plan, const int32_t* choices, int experts, cudaStream_t stream);

// rows[r] = source[slot / k], zeros for padding. bf16, `width` a multiple of 8.
cudaError_t launch_gather(const ExpertPlan& plan, const void* source, int k, int width, void* rows,
                          cudaStream_t stream);
// out[t] = sum_i weights[t, i] rows[row of (t, i)] in fp32 in the order of i; weights null = ones.
cudaError_t launch_combine(const ExpertPlan& plan, const void* rows, const float* weights,
                           const MoeShape& shape, void* out, cudaStream_t stream);

}  // namespace godwit::kernels::cuda::sm90
