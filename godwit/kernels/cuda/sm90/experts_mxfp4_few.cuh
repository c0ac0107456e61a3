// The packed products of experts_mxfp4.cuh for up to kFewTokens tokens, of which no expert has more than 16.
// Rows then take little room and accumulators few registers, so two blocks share a multiprocessor: unpacking
// is bound by how many warps take part in it.
//
// Work is cut into pieces of 64 rows of A, for one warpgroup each, and a block takes an equal run of them,
// two at a time: with a token's 16 experts, whole tiles of 256 would be one or two a block, and the last of
// them would have the device to themselves. Pairs: a piece is 32 rows of w1 and the same of w3. Codes come in
// rows of 128 bytes, 256 k, which the copy engine moves faster than rows of 64.
//
// The second product's kernel starts while the first one ends: it fills its ring with weights, and waits for
// the first only before it asks for rows.
#pragma once

#include "godwit/kernels/cuda/sm90/experts_mxfp4.cuh"

namespace godwit::kernels::cuda::sm90 {

inline constexpr int kFewTokens = 16;
constexpr int kFewK = 256;
constexpr int kPieceCodes = 64 * kFewK / 2, kPieceScales = 64 * 16;  // bytes of a piece; scales of 512 k
constexpr int kFewCodes = 2 * kPieceCodes, kFewScales = 2 * kPieceScales, kScaleBuffers = 3;
// kRows token rows, 8 or 16, of every expert.
template <int kRows>
struct FewLayout {
  static constexpr int kPanel = kRows * 128;  // 64 k of the rows
  static constexpr int kRowBytes = kFewK / 64 * kPanel;
  static constexpr int kStage = kFewCodes + kRowBytes;
  static constexpr int kShared = kStages * kStage + kScaleBuffers * kFewScales + int(sizeof(ProductBarriers));
};
constexpr int kFewThreads = 288;  // a producer warp after the consumers
static_assert(2 * (FewLayout<16>::kShared + 1024) <= 233472);

// One or two pieces of an expert.
struct Chunk {
  RowTile rows;
  int piece;
  int count;
};
__device__ __forceinline__ Chunk chunk_at(const PackedArgs& args, int piece, int end) {
  const int pieces = args.base.a_tiles, tile = piece / pieces, first = piece - tile * pieces;
  return {args.base.tiles[tile], first, min(2, min(pieces - first, end - piece))};
}
// The block's run of pieces.
struct PieceRun {
  int begin, end;
};
__device__ __forceinline__ PieceRun piece_run(const PackedArgs& args) {
  const int64_t pieces = int64_t{args.base.totals[1]} * args.base.a_tiles;
  return {int(pieces * blockIdx.x / gridDim.x), int(pieces * (blockIdx.x + 1) / gridDim.x)};
}

// Weights of block kb of k, and every other time the scales of two blocks.
template <bool kPairs>
__device__ __forceinline__ void load_pieces(const PackedArgs& args, const Chunk& chunk, int kb,
                                            uint8_t* codes, uint8_t* scales, uint64_t* full) {
  constexpr int kWeights = kPairs ? 2 : 1, kRows = 64 / kWeights;
  for (int i = 0; i < chunk.count; ++i) {
    const int row = (chunk.piece + i) * kRows;
    for (int w = 0; w < kWeights; ++w) {
      const int part = i * kWeights + w;
      tensor_load(codes + part * kPieceCodes / kWeights, &args.base.a[w], kb * kFewK / 2, row,
                  chunk.rows.expert, full);
      if (kb % 2 == 0)
        tensor_load(scales + part * kPieceScales / kWeights, &args.scales[w], kb * 8, row, chunk.rows.expert,
                    full);
    }
  }
}
template <int kRows>
__device__ __forceinline__ void load_few_rows(const PackedArgs& args, const Chunk& chunk, int kb, uint8_t* x,
                                              uint64_t* full) {
  for (int panel = 0; panel < kFewK / 64; ++panel)
    tensor_load(x + panel * FewLayout<kRows>::kPanel, &args.base.x32, kb * kFewK + panel * 64,
                chunk.rows.begin, 0, full);
}

// The second product's rows come from the kernel before, which may still run.
template <bool kPairs, int kRows>
__device__ void produce_few(const PackedArgs& args, uint8_t* shared, uint8_t* scales, ProductBarriers& bar) {
  using Layout = FewLayout<kRows>;
  const PieceRun run = piece_run(args);
  int at = 0, scale_at = -1;
  const int ahead =
      kPairs ? 0 : min(kStages, args.base.k_blocks);  // blocks whose weights come before the rows
  for (int p = run.begin; p < run.end;) {
    const Chunk chunk = chunk_at(args, p, run.end);
    const auto rows = [&](int kb, int stage) {
      load_few_rows<kRows>(args, chunk, kb, shared + stage * Layout::kStage + kFewCodes, &bar.full[stage]);
    };
    for (int kb = 0; kb < args.base.k_blocks; ++kb, ++at) {
      const int stage = at % kStages;
      mbarrier_wait(&bar.empty[stage], (at / kStages + 1) & 1);
      // The last users of the scales' buffer have released later stages.
      const int scale_bytes = kb % 2 == 0 ? chunk.count * kPieceScales : 0;
      mbarrier_arrive_expect(&bar.full[stage], chunk.count * kPieceCodes + scale_bytes + Layout::kRowBytes);
      scale_at += kb % 2 == 0;
      load_pieces<kPairs>(args, chunk, kb, shared + stage * Layout::kStage,
                          scales + scale_at % kScaleBuffers * kFewScales, &bar.full[stage]);
      if (at + 1 < ahead) continue;
      if (at + 1 == ahead) {
        wait_for_prerequisites();
        for (int i = 0; i < ahead - 1; ++i) rows(i, i);
      }
      rows(kb, stage);
    }
    p += chunk.count;
  }
}

// A thread's 32 k of block `half` of 128, of its two rows of A. 16-byte units are swizzled as wgmma has them.
__device__ __forceinline__ CodeRows load_few_codes(const uint8_t* codes, const uint8_t* scales, int low,
                                                   int high, int unit) {
  CodeRows r;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = h == 0 ? low : high;
    const uint4 w = *reinterpret_cast<const uint4*>(codes + row * 128 + ((unit ^ (row & 7)) << 4));
    r.word[h][0] = w.x, r.word[h][1] = w.y, r.word[h][2] = w.z, r.word[h][3] = w.w;
    r.factor[h] = scale_factor(scales[row * 16 + unit]);
  }
  return r;
}

// The two steps of a word.
template <int kWord>
__device__ __forceinline__ void unpack_word(const CodeRows& r, uint32_t (&a)[2][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    uint32_t pair[4];
    unpack(r.word[h][kWord], r.factor[h], pair);
    a[0][h] = pair[0], a[0][2 + h] = pair[1];
    a[1][h] = pair[2], a[1][2 + h] = pair[3];
  }
}

// The rows of A behind a thread's accumulator rows, l = lane / 4 and l + 8 of its warp's 16: pairs, gate and
// up of one feature. Lanes side by side read rows four apart, which lie in other banks.
struct FewRows {
  int low, high;
};
template <bool kPairs>
__device__ __forceinline__ FewRows few_rows() {
  const int l = threadIdx.x % 32 / 4, row = (l & 1) << 2 | (l & 2) | l >> 2, warp = threadIdx.x % 128 / 32;
  return kPairs ? FewRows{warp * 8 + row, 32 + warp * 8 + row}
                : FewRows{warp * 16 + row, warp * 16 + 8 + row};
}

// Values of `feature` for the token rows that a thread has: 2 (lane % 4) and the next, and the same 8 rows
// on.
template <int kRows, class Value>
__device__ __forceinline__ void store_feature(const PackedArgs& args, const RowTile& rows, int feature,
                                              const Value& value) {
#pragma unroll
  for (int g = 0; g < kRows / 8; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 8 * g + 2 * (threadIdx.x % 4) + i;
      if (row < rows.rows)
        args.base.out[int64_t(rows.begin + row) * args.base.features + feature] =
            __float2bfloat16_rn(value(g, i));
    }
  }
}

// A warpgroup's piece of a chunk.
template <bool kPairs, int kRows>
__device__ __forceinline__ void consume_few(const PackedArgs& args, const uint8_t* scales, Consumer& c,
                                            int& scale_at, const Chunk& chunk) {
  if (uniform(c.group >= chunk.count)) {  // none
    for (int kb = 0; kb < args.base.k_blocks; ++kb, ++c.at) {
      mbarrier_wait(&c.bar->full[c.at % kStages], c.at / kStages & 1);
      release(*c.bar, c.at % kStages);
    }
    scale_at += args.base.k_blocks / 2;
    return;
  }
  float d[kRows / 2];
  clear(d);
  const FewRows a = few_rows<kPairs>();
  const int quad = threadIdx.x % 4;
  for (int kb = 0; kb < args.base.k_blocks; ++kb, ++c.at) {
    const int stage = c.at % kStages;
    mbarrier_wait(&c.bar->full[stage], c.at / kStages & 1);
    scale_at += kb % 2 == 0;
    const uint8_t* codes = c.shared + stage * FewLayout<kRows>::kStage;
    const uint64_t rows = wgmma_descriptor(smem_address(codes + kFewCodes), 1024, 0);
    const uint8_t* scale =
        scales + scale_at % kScaleBuffers * kFewScales + c.group * kPieceScales + kb % 2 * 8;
    // Two sets of fragments take turns: one is unpacked while wgmma reads the other.
    uint32_t a0[2][4], a1[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kPanel = FewLayout<kRows>::kPanel / 16;  // in the descriptor's units
      const uint64_t x = rows + 2 * half * kPanel;
      const CodeRows w = load_few_codes(codes + c.group * kPieceCodes, scale, a.low, a.high, 4 * half + quad);
      wgmma_wait<1>();
      unpack_word<0>(w, a0);
      multiply<kRows>(d, a0, x);
      wgmma_wait<1>();
      if (half == 0 && kb > 0) release(*c.bar, (c.at - 1) % kStages);  // the last block is done with
      unpack_word<1>(w, a1);
      multiply<kRows>(d, a1, x + 4);
      wgmma_wait<1>();
      unpack_word<2>(w, a0);
      multiply<kRows>(d, a0, x + kPanel);
      wgmma_wait<1>();
      unpack_word<3>(w, a1);
      multiply<kRows>(d, a1, x + kPanel + 4);
    }
  }
  wgmma_wait<0>();
  pin(d);
  release(*c.bar, (c.at - 1) % kStages);
  const int first = (chunk.piece + c.group) * (kPairs ? 32 : 64);
  if constexpr (kPairs) {
    const GluConstants form(args.base.form);
    const int feature = first + a.low;
    store_feature<kRows>(args, chunk.rows, (feature & ~127) | position_of_k(feature & 127),
                         [&](int g, int i) { return glu(d[4 * g + i], d[4 * g + 2 + i], form); });
  } else {
    store_feature<kRows>(args, chunk.rows, first + a.low, [&](int g, int i) { return d[4 * g + i]; });
    store_feature<kRows>(args, chunk.rows, first + a.high, [&](int g, int i) { return d[4 * g + 2 + i]; });
  }
}

template <bool kPairs, int kRows>
__global__ void __launch_bounds__(kFewThreads, 2) few_kernel(const __grid_constant__ PackedArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* scales = shared + kStages * FewLayout<kRows>::kStage;
  ProductBarriers& bar = *reinterpret_cast<ProductBarriers*>(scales + kScaleBuffers * kFewScales);
  const int group = uniform(threadIdx.x / 128);
  init_barriers(bar);
  if constexpr (kPairs) launch_dependents();
  if (group == 2) {
    if (threadIdx.x % 128 == 0) produce_few<kPairs, kRows>(args, shared, scales, bar);
  } else {
    Consumer c{shared, nullptr, &bar, group, 0};
    int scale_at = -1;
    const PieceRun run = piece_run(args);
    for (int p = run.begin; p < run.end;) {
      const Chunk chunk = chunk_at(args, p, run.end);
      consume_few<kPairs, kRows>(args, scales, c, scale_at, chunk);
      p += chunk.count;
    }
  }
}

// codes [experts, rows, width / 2] and scales [experts, rows, width / 32]; width and rows multiples of 512.
inline cudaError_t few_maps(PackedArgs* args, int which, const PackedWeight& w, bool pairs) {
  const auto map = [&](CUtensorMap* out, const void* base, uint64_t bytes, uint32_t box, BoxType type) {
    return make_tensor_map(out,
                           {.base = base,
                            .size = {bytes, uint64_t(w.rows), uint64_t(w.experts)},
                            .stride = {bytes, bytes * w.rows},
                            .box = {box, pairs ? 32u : 64u, 1}},
                           type);
  };
  const cudaError_t error =
      map(&args->base.a[which], w.codes, w.width / 2, kFewK / 2, BoxType::kBytesSwizzled);
  return error == cudaSuccess ? map(&args->scales[which], w.scales, w.width / 32, 16, BoxType::kBytes)
                              : error;
}

}  // namespace godwit::kernels::cuda::sm90
