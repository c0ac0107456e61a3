// Gradients of the experts' weights: for every expert e, over its rows r,
//   dW_e[m, n] = sum_r A[r, m] B[r, n]
// A and B are rows sorted by expert (experts_plan.cuh), bf16, with zeros where an expert's rows are padded.
// Both operands are read as they lie, [k][rows] to wgmma. Tiles of 256 by N, 128 or 192: the wider one takes
// fewer operands from the L2 cache, which is what bounds experts of few rows. Blocks of 64 rows, of which
// the last is cut to steps of 16, so no row of another expert enters. An expert without rows gets zeros.
// Producer, ring and consumers are those of experts_gemm.cuh; an expert has few blocks, so much of the time
// goes into writing, which one consumer does while the other multiplies.
#pragma once

#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"

namespace godwit::kernels::cuda::sm90 {

struct WeightGradArgs {
  CUtensorMap a;  // boxes of 64 columns by 64 rows
  CUtensorMap b;
  const ExpertRange* ranges = nullptr;
  int experts = 0;
  int m = 0;
  int n = 0;
  int m_tiles = 0;               // of 256
  int n_tiles = 0;               // of N
  __nv_bfloat16* out = nullptr;  // [E, m, n]
};

constexpr int kPanelBytes = 64 * 64 * 2;  // 64 rows of 64 columns
constexpr int kWarpStore = 16 * 64 * 2;
template <int N>
struct GradLayout {
  static constexpr int kPanels = N / 64;  // of B; A has four
  static constexpr int kStage = (4 + kPanels) * kPanelBytes;
  static constexpr int kCount = N == 128 ? 4 : 3;  // stages
  static constexpr int kShared = kCount * kStage + 8 * kWarpStore + sizeof(ProductBarriers);
};
static_assert(GradLayout<192>::kShared <= 232448 && GradLayout<128>::kCount <= kStages);

struct GradTile {
  ExpertRange rows;
  int expert, m0, n0;
};
template <int N>
__device__ __forceinline__ GradTile grad_tile(const WeightGradArgs& args, int t) {
  const int per_expert = args.m_tiles * args.n_tiles;
  const int e = t / per_expert, local = t - e * per_expert, m = local / args.n_tiles;
  return {args.ranges[e], e, m * 256, (local - m * args.n_tiles) * N};
}

template <int N>
__device__ __forceinline__ void produce_gradient(const WeightGradArgs& args, uint8_t* shared,
                                                 ProductBarriers& bar) {
  using Layout = GradLayout<N>;
  const int tiles = args.experts * args.m_tiles * args.n_tiles;
  int at = 0;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const GradTile tile = grad_tile<N>(args, t);
    for (int r = tile.rows.begin; r < tile.rows.end; r += 64, ++at) {
      const int stage = at % Layout::kCount;
      uint8_t* to = shared + stage * Layout::kStage;
      uint64_t* full = &bar.full[stage];
      mbarrier_wait(&bar.empty[stage], (at / Layout::kCount + 1) & 1);
      mbarrier_arrive_expect(full, Layout::kStage);
      for (int i = 0; i < 4; ++i) tensor_load(to + i * kPanelBytes, &args.a, tile.m0 + i * 64, r, 0, full);
      for (int i = 0; i < Layout::kPanels; ++i)
        tensor_load(to + (4 + i) * kPanelBytes, &args.b, tile.n0 + i * 64, r, 0, full);
    }
  }
}

// A warp's 16 rows by N columns of 64 rows, by way of its own 16 x 64 in shared memory.
template <int N>
__device__ __forceinline__ void store_gradient(const WeightGradArgs& args, const float (&d)[N / 2],
                                               uint8_t* buffer, int64_t row0, int rows, int n0) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int panel = 0; panel < N / 64; ++panel) {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* f = d + panel * 32 + i * 8;  // columns 16 i and 16 i + 8
      const uint32_t r[4] = {pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]),
                             pack_bf16(f[6], f[7])};
      const int row = lane % 16, unit = 2 * i + lane / 16;
      stmatrix_x4(smem_address(buffer) + row * 128 + ((unit ^ (row & 7)) << 4), r);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i * 4 + lane / 8, unit = lane % 8, n = n0 + panel * 64 + unit * 8;
      const uint4 v = *reinterpret_cast<const uint4*>(buffer + row * 128 + ((unit ^ (row & 7)) << 4));
      if (row < rows && n < args.n) *reinterpret_cast<uint4*>(args.out + (row0 + row) * args.n + n) = v;
    }
  }
}

template <int N>
__device__ __forceinline__ void consume_gradient(const WeightGradArgs& args, Consumer& c,
                                                 const GradTile& tile, bool lead, bool trail) {
  using Layout = GradLayout<N>;
  float d[2][N / 2];
  clear(d[0]), clear(d[1]);
  const int blocks = (tile.rows.end - tile.rows.begin + 63) / 64;
  if (trail) mbarrier_wait(&c.bar->late, 0);
  for (int kb = 0; kb < blocks; ++kb, ++c.at) {
    const int stage = c.at % Layout::kCount;
    mbarrier_wait(&c.bar->full[stage], c.at / Layout::kCount & 1);
    const uint32_t base = smem_address(c.shared + stage * Layout::kStage);
    const uint64_t a0 = wgmma_descriptor(base + 2 * c.group * kPanelBytes, 1024, 0);
    const uint64_t a1 = wgmma_descriptor(base + (2 * c.group + 1) * kPanelBytes, 1024, 0);
    const uint64_t b = wgmma_descriptor(base + 4 * kPanelBytes, 1024, kPanelBytes);
    const int steps = min(4, (tile.rows.end - tile.rows.begin - kb * 64) / 16);
    if (steps == 4) {
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 4; ++kk) {
        Wgmma<N>::template smem<1, 1>(d[0], a0 + kk * 128, b + kk * 128);
        Wgmma<N>::template smem<1, 1>(d[1], a1 + kk * 128, b + kk * 128);
      }
    } else {
      for (int kk = 0; kk < steps; ++kk) {
        wgmma_fence();
        Wgmma<N>::template smem<1, 1>(d[0], a0 + kk * 128, b + kk * 128);
        Wgmma<N>::template smem<1, 1>(d[1], a1 + kk * 128, b + kk * 128);
      }
    }
    wgmma_commit();
    if (kb > 0) {
      wgmma_wait<1>();
      release(*c.bar, (c.at - 1) % Layout::kCount);
    }
    if (lead && kb == min(1, blocks - 1) && threadIdx.x % 128 == 0) mbarrier_arrive(&c.bar->late);
  }
  if (lead && blocks == 0 && threadIdx.x % 128 == 0) mbarrier_arrive(&c.bar->late);
  wgmma_wait<0>();
  pin(d[0]), pin(d[1]);
  if (blocks > 0) release(*c.bar, (c.at - 1) % Layout::kCount);
  const int warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int m = tile.m0 + c.group * 128 + half * 64 + warp * 16;
    store_gradient<N>(args, d[half], c.store + warp * kWarpStore, int64_t(tile.expert) * args.m + m,
                      args.m - m, tile.n0);
  }
}

template <int N>
__global__ void __launch_bounds__(kProductThreads, 1)
    weight_grad_kernel(const __grid_constant__ WeightGradArgs args) {
  using Layout = GradLayout<N>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* store = shared + Layout::kCount * Layout::kStage;
  ProductBarriers& bar = *reinterpret_cast<ProductBarriers*>(store + 8 * kWarpStore);
  const int role = uniform(threadIdx.x / 128);
  init_barriers(bar);
  if (role == 0) {
    registers_down<24>();
    if (threadIdx.x == 0) produce_gradient<N>(args, shared, bar);
  } else {
    registers_up<240>();
    Consumer c{shared, store + (role - 1) * 4 * kWarpStore, &bar, role - 1, 0};
    const int tiles = args.experts * args.m_tiles * args.n_tiles, begin = blockIdx.x;
    for (int t = begin; t < tiles; t += gridDim.x) {
      consume_gradient<N>(args, c, grad_tile<N>(args, t), t == begin && c.group == 0,
                          t == begin && c.group == 1);
    }
  }
}

}  // namespace godwit::kernels::cuda::sm90
