#include "godwit/kernels/cuda/sm90/experts_plan.cuh"

#include <algorithm>

#include "godwit/kernels/cuda/sm90/ptx.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

constexpr int kPlanBlock = 1024;  // slots, and threads

// Counts the block's slots into bins [E] in shared memory.
__device__ void count_slots(const int32_t* choices, int64_t slots, int experts, int* bins) {
  for (int e = threadIdx.x; e < experts; e += kPlanBlock) bins[e] = 0;
  __syncthreads();
  const int64_t slot = int64_t(blockIdx.x) * kPlanBlock + threadIdx.x;
  if (slot < slots) {
    const int e = choices[slot];
    if (e < 0 || e >= experts) __trap();
    atomicAdd(&bins[e], 1);
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kPlanBlock)
    count_kernel(const int32_t* choices, int64_t slots, int experts, int* counts) {
  extern __shared__ int bins[];
  count_slots(choices, slots, experts, bins);
  for (int e = threadIdx.x; e < experts; e += kPlanBlock) counts[int64_t(blockIdx.x) * experts + e] = bins[e];
}

// The sum of `x` over the threads before this one; all threads of the block take part.
__device__ int exclusive_sum(int x, int* total) {
  __shared__ int warp_sum[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = x;
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, inclusive, d);
    if (lane >= d) inclusive += other;
  }
  __syncthreads();  // the last call's readers are done
  if (lane == 31) warp_sum[warp] = inclusive;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < kPlanBlock / 32; ++w) {
    if (w == warp) before = all;
    all += warp_sum[w];
  }
  *total = all;
  return before + inclusive - x;
}

// Ranges of rows and tiles of all experts, by one block. count(e) is an expert's slots; begins(e, row) takes
// its first row.
template <class Count, class Begins>
__device__ void assign_rows(const ExpertPlan& plan, int experts, const Count& count, const Begins& begins) {
  int rows_before = 0, tiles_before = 0;
  for (int base = 0; base < experts; base += kPlanBlock) {
    const int e = base + threadIdx.x;
    const int padded = e < experts ? (count(e) + kRowPad - 1) / kRowPad * kRowPad : 0;
    const int tiles = (padded + plan.tile_rows - 1) / plan.tile_rows;
    int all_rows, all_tiles;
    const int begin = rows_before + exclusive_sum(padded, &all_rows);
    const int first = tiles_before + exclusive_sum(tiles, &all_tiles);
    rows_before += all_rows, tiles_before += all_tiles;
    if (e >= experts) continue;
    plan.ranges[e] = {begin, begin + padded};
    begins(e, begin);
    const int step = tiles > 0 ? ((padded + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    for (int i = 0; i < tiles; ++i) {
      plan.tiles[first + i] = {e, begin + i * step, min(step, padded - i * step), first, tiles, {0, 0, 0}};
    }
  }
  if (threadIdx.x == 0) plan.totals[0] = rows_before, plan.totals[1] = tiles_before;
}

__global__ void __launch_bounds__(kPlanBlock) plan_kernel(ExpertPlan plan, int experts) {
  assign_rows(
      plan, experts,
      [&](int e) {
        int count = 0;
        for (int b = 0; b < plan.blocks; ++b) count += plan.counts[int64_t(b) * experts + e];
        return count;
      },
      [&](int e, int row) {
        for (int b = 0; b < plan.blocks; ++b) {
          int& slot = plan.counts[int64_t(b) * experts + e];
          const int here = slot;
          slot = row;
          row += here;
        }
      });
}

// Gives the block's slots their rows; next [E] in shared memory is each expert's next row. The warps take
// their turn, so a slot's row is the expert's first plus the number of slots before it.
__device__ void place_slots(const ExpertPlan& plan, const int32_t* choices, int* next) {
  const int64_t slot = int64_t(blockIdx.x) * kPlanBlock + threadIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int e = slot < plan.slots ? choices[slot] : -1;
  const unsigned same = __match_any_sync(0xffffffffu, e);
  const int rank = __popc(same & ((1u << lane) - 1));
  const int warps = int(min(int64_t(kPlanBlock), plan.slots - int64_t(blockIdx.x) * kPlanBlock) + 31) / 32;
  for (int w = 0; w < warps; ++w) {
    __syncthreads();
    if (w != warp) continue;
    const int row = e >= 0 ? next[e] + rank : 0;
    __syncwarp();
    if (e < 0) continue;
    if (rank == 0) next[e] += __popc(same);
    plan.slot_row[slot] = row;
    plan.row_slot[row] = int(slot);
  }
}

__global__ void __launch_bounds__(kPlanBlock)
    place_kernel(ExpertPlan plan, const int32_t* choices, int experts) {
  extern __shared__ int next[];
  for (int e = threadIdx.x; e < experts; e += kPlanBlock)
    next[e] = plan.counts[int64_t(blockIdx.x) * experts + e];
  place_slots(plan, choices, next);
}

// All of it for the slots of one block, as decoding has them.
__global__ void __launch_bounds__(kPlanBlock)
    small_plan_kernel(ExpertPlan plan, const int32_t* choices, int experts) {
  extern __shared__ int bins[];
  for (int64_t row = threadIdx.x; row < plan.max_rows; row += kPlanBlock) plan.row_slot[row] = -1;
  count_slots(choices, plan.slots, experts, bins);
  assign_rows(
      plan, experts, [&](int e) { return bins[e]; }, [&](int e, int row) { bins[e] = row; });
  place_slots(plan, choices, bins);
}

constexpr int kCopyThreads = 128;

__global__ void __launch_bounds__(kCopyThreads)
    gather_kernel(ExpertPlan plan, const uint4* source, int k, int units, uint4* rows) {
  const int row = blockIdx.x;
  if (row >= plan.totals[0]) return;
  const int slot = plan.row_slot[row];
  const uint4* from = source + int64_t(max(slot, 0) / k) * units;
  uint4* to = rows + int64_t(row) * units;
  for (int i = threadIdx.x; i < units; i += kCopyThreads) to[i] = slot < 0 ? uint4{0, 0, 0, 0} : from[i];
}

__global__ void __launch_bounds__(kCopyThreads)
    combine_kernel(ExpertPlan plan, const uint4* rows, const float* weights, int k, int units, uint4* out) {
  const int64_t token = blockIdx.x;
  for (int u = threadIdx.x; u < units; u += kCopyThreads) {
    float sum[8] = {};
    for (int i = 0; i < k; ++i) {
      const int64_t slot = token * k + i;
      const uint4 x = rows[int64_t(plan.slot_row[slot]) * units + u];
      const float p = weights != nullptr ? weights[slot] : 1.f;
      const uint32_t part[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sum[2 * j] = fmaf(p, low_bf16(part[j]), sum[2 * j]);
        sum[2 * j + 1] = fmaf(p, high_bf16(part[j]), sum[2 * j + 1]);
      }
    }
    out[token * units + u] = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                              pack_bf16(sum[6], sum[7])};
  }
}

}  // namespace

size_t layout_plan(const MoeShape& shape, void* memory, ExpertPlan* plan) {
  plan->slots = shape.tokens * shape.k;
  const int64_t used = std::min(plan->slots, shape.experts);
  plan->max_rows = (plan->slots + (kRowPad - 1) * used + kRowPad - 1) / kRowPad * kRowPad;
  plan->max_tiles = used + plan->max_rows / plan->tile_rows;
  plan->blocks = int((plan->slots + kPlanBlock - 1) / kPlanBlock);
  size_t at = 0;
  const auto take = [&]<class T>(T** pointer, int64_t count) {
    *pointer = reinterpret_cast<T*>(static_cast<char*>(memory) + at);
    at += (count * sizeof(T) + 255) / 256 * 256;
  };
  take(&plan->counts, plan->blocks * shape.experts);
  take(&plan->slot_row, plan->slots);
  take(&plan->row_slot, plan->max_rows);
  take(&plan->totals, 2);
  take(&plan->tiles, plan->max_tiles);
  take(&plan->ranges, shape.experts);
  return at;
}

cudaError_t launch_plan(const ExpertPlan& plan, const int32_t* choices, int experts, cudaStream_t stream) {
  const size_t shared = experts * sizeof(int);
  if (plan.blocks == 1) {
    small_plan_kernel<<<1, kPlanBlock, shared, stream>>>(plan, choices, experts);
    return cudaGetLastError();
  }
  const cudaError_t error = cudaMemsetAsync(plan.row_slot, 0xff, plan.max_rows * sizeof(int), stream);
  if (error != cudaSuccess) return error;
  count_kernel<<<plan.blocks, kPlanBlock, shared, stream>>>(choices, plan.slots, experts, plan.counts);
  plan_kernel<<<1, kPlanBlock, 0, stream>>>(plan, experts);
  place_kernel<<<plan.blocks, kPlanBlock, shared, stream>>>(plan, choices, experts);
  return cudaGetLastError();
}

cudaError_t launch_gather(const ExpertPlan& plan, const void* source, int k, int width, void* rows,
                          cudaStream_t stream) {
  gather_kernel<<<unsigned(plan.max_rows), kCopyThreads, 0, stream>>>(
      plan, static_cast<const uint4*>(source), k, width / 8, static_cast<uint4*>(rows));
  return cudaGetLastError();
}

cudaError_t launch_combine(const ExpertPlan& plan, const void* rows, const float* weights,
                           const MoeShape& shape, void* out, cudaStream_t stream) {
  combine_kernel<<<unsigned(shape.tokens), kCopyThreads, 0, stream>>>(
      plan, static_cast<const uint4*>(rows), weights, int(shape.k), int(shape.width / 8),
      static_cast<uint4*>(out));
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
