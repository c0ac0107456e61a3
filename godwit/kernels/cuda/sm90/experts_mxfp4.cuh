// The grouped products of experts_gemm.cuh with MXFP4 weights (io/mxfp4.h): two E2M1 codes a byte, a power of
// two for 32 of them. The packed bytes go to shared memory as they are; a consumer makes bf16 fragments of
// them in registers, exactly, and wgmma takes A from there. So device memory and shared memory see 4.25 bits
// a weight.
//
// A thread's 16 bytes of a row are 32 neighbouring k, under one scale. wgmma wants other k of a thread;
// instead of moving codes between threads, the k of every block of 128 stand in another order in X
// (permuted_k), in which the gather writes rows, and in which the first product writes its features for the
// second.
#pragma once

#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"

namespace godwit::kernels::cuda::sm90 {

inline constexpr int kPackedK = 128;
inline constexpr int kPackedRows = 96;  // the widest tile: fragments of A take registers too

// The k that stands at position p of a block: p = (word j, pair i, thread t, half h), k = (t, j, h, i).
__host__ __device__ constexpr int permuted_k(int p) {
  const int j = p >> 5 & 3, i = p >> 3 & 3, t = p >> 1 & 3, h = p & 1;
  return t << 5 | j << 3 | h << 2 | i;
}
// Its inverse.
__host__ __device__ constexpr int position_of_k(int k) {
  const int t = k >> 5 & 3, j = k >> 3 & 3, h = k >> 2 & 1, i = k & 3;
  return j << 5 | i << 3 | t << 1 | h;
}

struct PackedArgs {
  ProductArgs base;       // a: codes, boxes of 64 bytes by 128 rows; k_blocks of kPackedK
  CUtensorMap scales[2];  // boxes of 16 bytes by 128 rows: four blocks of k
};

constexpr int kPackedA = kTileA * kPackedK / 2;
constexpr int kScaleBytes = kTileA * 16;
constexpr int kPackedPanel = kPackedRows * 128;  // 64 k
constexpr int kPackedStage = kPackedA + 2 * kPackedPanel;
constexpr int kPackedShared =
    kStages * kPackedStage + 2 * kScaleBytes + 4 * kStoreBytes + sizeof(ProductBarriers);

// With a fourth width the compiler runs out of registers and serialises wgmma.
__device__ __forceinline__ int packed_width(int rows) {
  return rows <= 16 ? 16 : rows <= 32 ? 32 : kPackedRows;
}

template <bool kPairs>
__device__ void produce_packed(const PackedArgs& args, uint8_t* shared, uint8_t* scales,
                               ProductBarriers& bar) {
  const int tiles = args.base.totals[1] * args.base.a_tiles;
  int at = 0, scale_at = 0;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Tile tile = tile_at(args.base, t);
    const int width = packed_width(tile.rows.rows), e = tile.rows.expert,
              row = tile.a_tile * (kPairs ? 128 : 256);
    const int second = kPairs ? row : row + 128;
    for (int kb = 0; kb < args.base.k_blocks; ++kb, ++at) {
      const int stage = at % kStages;
      uint8_t* a = shared + stage * kPackedStage;
      uint64_t* full = &bar.full[stage];
      mbarrier_wait(&bar.empty[stage], (at / kStages + 1) & 1);
      const bool with_scales =
          kb % 4 == 0;  // those of four blocks; the buffer's last user has released a later stage
      mbarrier_arrive_expect(full, kPackedA + 2 * width * 128 + (with_scales ? kScaleBytes : 0));
      tensor_load(a, &args.base.a[0], kb * 64, row, e, full);
      tensor_load(a + kPackedA / 2, &args.base.a[kPairs], kb * 64, second, e, full);
      if (with_scales) {
        uint8_t* to = scales + (scale_at++ & 1) * kScaleBytes;
        tensor_load(to, &args.scales[0], kb * 4, row, e, full);
        tensor_load(to + kScaleBytes / 2, &args.scales[kPairs], kb * 4, second, e, full);
      }
      for (int panel = 0; panel < 2; ++panel) {
        uint8_t* x = a + kPackedA + panel * kPackedPanel;
        const int k = kb * kPackedK + panel * 64;
        int r = 0;
        for (; r + 32 <= width; r += 32)
          tensor_load(x + r * 128, &args.base.x32, k, tile.rows.begin + r, 0, full);
        for (; r < width; r += 8) tensor_load(x + r * 128, &args.base.x8, k, tile.rows.begin + r, 0, full);
      }
    }
  }
}

// Eight codes to four pairs of bf16, pair i = codes i and i + 4. Shifted into place, exponent and mantissa of
// a code are those of a bf16 of 2^-126 times its value (subnormals too), which the scale's factor makes up
// for.
__device__ __forceinline__ void unpack(uint32_t w, uint32_t factor, uint32_t (&pair)[4]) {
  constexpr uint32_t kMagnitude = 0x01c001c0u, kSign = 0x80008000u;
  pair[0] = (w << 6 & kMagnitude) | (w << 12 & kSign);
  pair[1] = (w << 2 & kMagnitude) | (w << 8 & kSign);
  pair[2] = (w >> 2 & kMagnitude) | (w << 4 & kSign);
  pair[3] = (w >> 6 & kMagnitude) | (w & kSign);
#pragma unroll
  for (int i = 0; i < 4; ++i) asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair[i]) : "r"(factor));
}

// 2^126 2^(e - 127) as a pair of bf16, which ends at e = 128: a weight of 12.
__device__ __forceinline__ uint32_t scale_factor(uint8_t e) {
  return (min(uint32_t(e), 128u) + 126) * 0x00800080u;
}

// A thread's codes of 16 x 128: its two rows, 32 k each, and the factors of their scales.
struct CodeRows {
  uint32_t word[2][4];
  uint32_t factor[2];
};
__device__ __forceinline__ CodeRows load_codes(const uint8_t* codes, const uint8_t* scales, int low, int high,
                                               int quad) {
  CodeRows r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = h == 0 ? low : high;
    const uint4 w = *reinterpret_cast<const uint4*>(codes + row * 64 + quad * 16);
    r.word[h][0] = w.x, r.word[h][1] = w.y, r.word[h][2] = w.z, r.word[h][3] = w.w;
    r.factor[h] = scale_factor(scales[row * 16 + quad]);
  }
  return r;
}

// The four steps of 16 k of words `first` and first + 1.
template <int kFirst>
__device__ __forceinline__ void unpack_half(const CodeRows& r, uint32_t (&a)[4][4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t pair[4];
      unpack(r.word[h][kFirst + j], r.factor[h], pair);
      a[2 * j][h] = pair[0], a[2 * j][2 + h] = pair[1];
      a[2 * j + 1][h] = pair[2], a[2 * j + 1][2 + h] = pair[3];
    }
  }
}

template <int N, int kSteps>
__device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[kSteps][4], uint64_t x) {
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) Wgmma<N>::regs(d, a[s], x + s * 2);
  wgmma_commit();
}

template <int N, bool kPairs>
__device__ __forceinline__ void consume_packed(const PackedArgs& args, const uint8_t* scales, Consumer& c,
                                               int& scale_at, const Tile& tile) {
  float d[2][N / 2];
  clear(d[0]), clear(d[1]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, quad = lane % 4, m = warp * 16 + lane / 4;
  // The rows of A behind accumulator rows m and m + 8 of both pieces. Pairs: features in the second product's
  // order.
  const int low = kPairs ? permuted_k(c.group * 64 + m) : c.group * 128 + m;
  const int high = kPairs ? permuted_k(c.group * 64 + m + 8) : c.group * 128 + m + 8;
  constexpr int kNext = kPairs ? 128 : 64;
  for (int kb = 0; kb < args.base.k_blocks; ++kb, ++c.at) {
    const int stage = c.at % kStages;
    mbarrier_wait(&c.bar->full[stage], c.at / kStages & 1);
    const uint8_t* codes = c.shared + stage * kPackedStage;
    const uint8_t* scale = scales + ((scale_at + kb / 4) & 1) * kScaleBytes + kb % 4 * 4;
    const uint64_t x = wgmma_descriptor(smem_address(codes + kPackedA), 1024, 0);
    constexpr int kHalf = kPackedPanel / 16;
    // Two sets of fragments take turns: one is unpacked while wgmma reads the other.
    uint32_t a0[4][4], a1[4][4];
    const CodeRows first = load_codes(codes, scale, low, high, quad);
    const CodeRows second = load_codes(codes, scale, low + kNext, high + kNext, quad);
    wgmma_wait<1>();
    unpack_half<0>(first, a0);
    multiply<N>(d[0], a0, x);
    wgmma_wait<1>();  // the last block is done with
    if (kb > 0) release(*c.bar, (c.at - 1) % kStages);
    unpack_half<0>(second, a1);
    multiply<N>(d[1], a1, x);
    wgmma_wait<1>();
    unpack_half<2>(first, a0);
    multiply<N>(d[0], a0, x + kHalf);
    wgmma_wait<1>();
    unpack_half<2>(second, a1);
    multiply<N>(d[1], a1, x + kHalf);
  }
  wgmma_wait<0>();
  pin(d[0]), pin(d[1]);
  release(*c.bar, (c.at - 1) % kStages);
  scale_at += (args.base.k_blocks + 3) / 4;
  epilogue<N, kPairs ? Product::kGlu : Product::kPlain>(args.base, c, tile, d);
}

template <bool kPairs>
__global__ void __launch_bounds__(kProductThreads, 1) packed_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* scales = shared + kStages * kPackedStage;
  uint8_t* store = scales + 2 * kScaleBytes;
  ProductBarriers& bar = *reinterpret_cast<ProductBarriers*>(store + 4 * kStoreBytes);
  const int role = uniform(threadIdx.x / 128);
  init_barriers(bar);
  if (role == 0) {
    registers_down<24>();
    if (threadIdx.x == 0) produce_packed<kPairs>(args, shared, scales, bar);
  } else {
    registers_up<240>();
    Consumer c{shared, store + (role - 1) * 2 * kStoreBytes, &bar, role - 1, 0};
    int scale_at = 0;
    const int tiles = args.base.totals[1] * args.base.a_tiles;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      const Tile tile = tile_at(args.base, t);
      switch (uniform(packed_width(tile.rows.rows))) {
#define GODWIT_WIDTH(N)                                         \
  case N:                                                       \
    consume_packed<N, kPairs>(args, scales, c, scale_at, tile); \
    break;
        GODWIT_WIDTH(16)
        GODWIT_WIDTH(32)
        GODWIT_WIDTH(96)
#undef GODWIT_WIDTH
      }
    }
  }
}

// codes [experts, rows, width / 2] and scales [experts, rows, width / 32]; width a multiple of 512.
struct PackedWeight {
  const void* codes = nullptr;
  const void* scales = nullptr;
  int64_t experts = 0;
  int64_t rows = 0;
  int64_t width = 0;
};
inline cudaError_t packed_maps(PackedArgs* args, int which, const PackedWeight& w) {
  const auto map = [&](CUtensorMap* out, const void* base, int64_t bytes, uint32_t box) {
    return make_tensor_map(out,
                           {.base = base,
                            .size = {uint64_t(bytes), uint64_t(w.rows), uint64_t(w.experts)},
                            .stride = {uint64_t(bytes), uint64_t(bytes * w.rows)},
                            .box = {box, 128, 1}},
                           BoxType::kBytes);
  };
  const cudaError_t error = map(&args->base.a[which], w.codes, w.width / 2, kPackedK / 2);
  return error == cudaSuccess ? map(&args->scales[which], w.scales, w.width / 32, 16) : error;
}

}  // namespace godwit::kernels::cuda::sm90
