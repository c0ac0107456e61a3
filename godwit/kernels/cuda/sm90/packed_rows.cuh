// Products of a few bf16 rows with weights of any width that is a multiple of 16, or 32 for MXFP4:
//   y[r, f] = sum_k x[r, k] w[f, k],          bf16
//   y[r, f] = s_f sum_k x[r, k] w[f, k],      int8: a float a feature,
//   y[r, f] = sum_k x[r, k] s[f, k / 32] w[f, k],   MXFP4: E2M1 codes and powers of two (io/mxfp4.h)
// for the rows of tiles, each tile with the weights of its expert, or of one matrix. Packed bytes go from
// device memory to registers once, become bf16 there, exactly, and enter mma.m16n8k16 as A; sums are fp32. A
// row's sum has one order, whatever else its tile holds.
//
// The contraction goes by blocks of 64 k. mma wants of a thread (quad q of four) other k than lie together in
// a row; as any order of k serves that A and B share, thread q takes k = 16 q to 16 q + 15 of a block: 16
// bytes of int8, 8 of MXFP4, and of x four values a step. x stands in shared memory in rows of kBlocks blocks
// and 16 bytes, so that the reads of B meet no bank twice.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "godwit/kernels/cuda/sm90/experts_plan.cuh"
#include "godwit/kernels/cuda/sm90/glu.cuh"

namespace godwit::kernels::cuda::sm90 {

enum class Packing { kBf16, kInt8, kMxfp4 };

// Bytes of a row of weights, and words that a thread has of a block of it.
template <Packing kPacking>
__host__ __device__ constexpr int64_t packed_bytes(int64_t width) {
  return kPacking == Packing::kBf16 ? width * 2 : kPacking == Packing::kInt8 ? width : width / 2;
}
template <Packing kPacking>
constexpr int kPackedWords = int(packed_bytes<kPacking>(16)) / 4;

// The weights behind one 16-row tile of A: gate and up are two of them.
struct PackedMatrix {
  const uint8_t* values = nullptr;  // [experts, features, width] or [experts, features, width / 2]
  const void* scales = nullptr;     // float [experts, features] or bytes [experts, features, width / 32]
};

struct PackedRowsArgs {
  PackedMatrix first, second;  // pairs: gate and up; else `second` is not read
  int features = 0;            // of a matrix
  int width = 0;
  const RowTile* tiles = nullptr;  // null: one matrix, tiles of kMostRows of `rows`
  const int* totals = nullptr;     // rows, tiles
  int rows = 0;
  const int* row_slot = nullptr;  // with tiles, by row; -1 = padding, behind an expert's rows
  int k = 0;                      // > 0: x's row is slot / k, else the tile's
  const __nv_bfloat16* x = nullptr;
  __nv_bfloat16* out = nullptr;  // [rows, features]
  GluForm form;
};

// kWarpsK of the block's four warps share a sum, kUnroll blocks each at a time; the others have features of
// their own. A warp has 32 rows of A: 16 features of gate and up, or 32 features.
template <int kWarpsK_, int kUnroll_, int kMostRows_>
struct PackedForm {
  static constexpr int kWarpsK = kWarpsK_, kUnroll = kUnroll_, kMostRows = kMostRows_;
  static constexpr int kWarpsM = 4 / kWarpsK, kBlocks = kWarpsK * kUnroll;
  static constexpr int kRowBytes = kBlocks * 128 + 16, kPanel = kMostRows * kRowBytes;
  static constexpr int kSumStride = kWarpsM * 32 + 4;  // floats of a row
  static constexpr int kSums = kWarpsK * kMostRows * kSumStride * 4;
  static constexpr int shared_bytes(int width) {
    const int panels = (width > kBlocks * 64 ? 2 : 1) * kPanel;
    return panels > kSums ? panels : kSums;
  }
};

// Packed bytes of a block that a thread has: rows g and g + 8 of both tiles of A.
template <Packing kPacking>
struct PackedBlock {
  uint32_t word[2][2][kPackedWords<kPacking>];
  uint8_t scale[2][2];
};

// Loads under a predicate, zeros without it: a branch around them would wait for each.
// kOnce: no other block on the multiprocessor wants them.
template <bool kOnce>
__device__ __forceinline__ uint4 load_sixteen(const void* from, bool wanted) {
  uint4 v = {0, 0, 0, 0};
  if constexpr (kOnce) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
        : "l"(from), "r"(uint32_t(wanted)));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %5, 0;\n@p ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
                 : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
                 : "l"(from), "r"(uint32_t(wanted)));
  }
  return v;
}
__device__ __forceinline__ uint2 load_eight(const uint8_t* from, bool wanted) {
  uint2 v = {0, 0};
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];\n}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(from), "r"(uint32_t(wanted)));
  return v;
}

template <Packing kPacking>
struct PackedReader {
  const uint8_t* row[2][2];
  const uint8_t* scale[2][2];
  int width;

  __device__ __forceinline__ PackedBlock<kPacking> load(int block) const {
    const int k = block * 64 + threadIdx.x % 4 * 16;
    const bool wanted = k < width;
    PackedBlock<kPacking> b;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (kPacking == Packing::kMxfp4) {
          const uint2 w = load_eight(row[m][h] + k / 2, wanted);
          b.word[m][h][0] = w.x, b.word[m][h][1] = w.y;
          b.scale[m][h] = __ldg(scale[m][h] + (wanted ? k / 32 : 0));
        } else {
#pragma unroll
          for (int i = 0; i < kPackedWords<kPacking>; i += 4) {
            const uint4 w = load_sixteen<true>(row[m][h] + packed_bytes<kPacking>(k) + 4 * i, wanted);
            b.word[m][h][i] = w.x, b.word[m][h][i + 1] = w.y;
            b.word[m][h][i + 2] = w.z, b.word[m][h][i + 3] = w.w;
          }
        }
      }
    }
    return b;
  }
};

// Two bytes as bf16: with m the low seven bits and s the sign, 128 + m and 128 + 128 s are bf16 patterns, and
// their difference is the number.
__device__ __forceinline__ uint32_t int8_pair(uint32_t word, uint32_t selector) {
  const uint32_t w = __byte_perm(word, 0x43434343u, selector);
  const uint32_t m = w & 0xff7fff7fu, s = w & 0xff80ff80u;
  uint32_t out;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(m), "r"(s));
  return out;
}

// Fragments of A of step `s` (of four) of a block. MXFP4: pairs are codes i and i + 4 of eight, shifted into
// place, where exponent and mantissa of a code are those of a bf16 of 2^-126 times its value (subnormals
// too); the factor makes up for that.
template <Packing kPacking>
__device__ __forceinline__ void fragment(const PackedBlock<kPacking>& b, int m, int s, uint32_t (&a)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (kPacking == Packing::kBf16) {
      a[h] = b.word[m][h][2 * s], a[2 + h] = b.word[m][h][2 * s + 1];
    } else if constexpr (kPacking == Packing::kInt8) {
      a[h] = int8_pair(b.word[m][h][s], 0x4140), a[2 + h] = int8_pair(b.word[m][h][s], 0x4342);
    } else {
      constexpr uint32_t kMagnitude = 0x01c001c0u, kSign = 0x80008000u;
      const uint32_t w = b.word[m][h][s / 2];
      // 2^126 2^(e - 127) as a pair of bf16, which ends at e = 128.
      const uint32_t factor = (min(uint32_t(b.scale[m][h]), 128u) + 126) * 0x00800080u;
      a[h] =
          s % 2 == 0 ? (w << 6 & kMagnitude) | (w << 12 & kSign) : (w >> 2 & kMagnitude) | (w << 4 & kSign);
      a[2 + h] = s % 2 == 0 ? (w << 2 & kMagnitude) | (w << 8 & kSign) : (w >> 6 & kMagnitude) | (w & kSign);
      asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a[h]) : "r"(factor));
      asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(a[2 + h]) : "r"(factor));
    }
  }
}

// Blocks [first, first + kBlocks) of the tile's rows of x, zeros beyond them. MXFP4: every eight values in
// the order 0 4 1 5 2 6 3 7, that of the pairs.
template <Packing kPacking, class Form, int N>
__device__ __forceinline__ void stage_rows(const PackedRowsArgs& args, const int* source, int first,
                                           uint8_t* panel) {
  constexpr int kUnits = Form::kBlocks * 8;  // of eight values
  constexpr int kTotal = N * kUnits, kAtOnce = kTotal >= 512 ? 4 : kTotal >= 256 ? 2 : 1;
  for (int at = threadIdx.x; at < kTotal; at += 128 * kAtOnce) {
    uint4 v[kAtOnce];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const int i = at + 128 * c, k = first * 64 + i % kUnits * 8, from = source[i / kUnits];
      const bool wanted = from >= 0 && k < args.width;
      v[c] = load_sixteen<false>(args.x + int64_t(from) * args.width + k, wanted);
    }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      const int i = at + 128 * c;
      if constexpr (kPacking == Packing::kMxfp4) {
        v[c] = {__byte_perm(v[c].x, v[c].z, 0x5410), __byte_perm(v[c].x, v[c].z, 0x7632),
                __byte_perm(v[c].y, v[c].w, 0x5410), __byte_perm(v[c].y, v[c].w, 0x7632)};
      }
      *reinterpret_cast<uint4*>(panel + i / kUnits * Form::kRowBytes + i % kUnits * 16) = v[c];
    }
  }
}

template <Packing kPacking, int N>
__device__ __forceinline__ void multiply_block(const PackedBlock<kPacking>& b, const uint8_t* x,
                                               int row_bytes, float (&d)[2][N / 8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[2][2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int m = 0; m < 2; ++m) fragment<kPacking>(b, m, 2 * half + s, a[s][m]);
    }
    // Four columns of tiles at a time: a sum is not needed again at once.
    constexpr int kColumns = N / 8 < 4 ? N / 8 : 4;
#pragma unroll
    for (int first = 0; first < N / 8; first += kColumns) {
      uint4 v[kColumns];
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
        v[n] = *reinterpret_cast<const uint4*>(x + (first + n) * 8 * row_bytes + half * 16);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) mma_bf16(d[m][first + n], a[0][m], v[n].x, v[n].y);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) mma_bf16(d[m][first + n], a[1][m], v[n].z, v[n].w);
      }
    }
  }
}

// The block's sums to its rows of `out`: eight features of a row a thread.
template <Packing kPacking, bool kPairs, class Form, int N>
__device__ __forceinline__ void finish_rows(const PackedRowsArgs& args, const float* sums, int group,
                                            int expert, int begin, int rows) {
  constexpr int kFeatures = Form::kWarpsM * (kPairs ? 16 : 32), kUnits = kFeatures / 8;
  const GluConstants form(args.form);
  for (int i = threadIdx.x; i < rows * kUnits; i += 128) {
    const int r = i / kUnits, f = i % kUnits * 8, feature = group * kFeatures + f;
    if (feature >= args.features) continue;
    const auto value = [&](int at, const PackedMatrix& matrix, int j) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < Form::kWarpsK; ++w)
        sum += sums[(w * Form::kMostRows + r) * Form::kSumStride + at + j];
      if constexpr (kPacking == Packing::kInt8)
        sum *= static_cast<const float*>(
            matrix.scales)[int64_t(expert) * args.features + min(feature + j, args.features - 1)];
      return sum;
    };
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (kPairs) {
        const int at = f / 16 * 32 + f % 16;
        y[j] = glu(value(at, args.first, j), value(at + 16, args.second, j), form);
      } else {
        y[j] = value(f, args.first, j);
      }
    }
    __nv_bfloat16* to = args.out + int64_t(begin + r) * args.features + feature;
    if (args.features % 8 == 0) {
      *reinterpret_cast<uint4*>(to) = {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]),
                                       pack_bf16(y[6], y[7])};
    } else {
      for (int j = 0; j < min(8, args.features - feature); ++j) to[j] = __float2bfloat16(y[j]);
    }
  }
}

template <Packing kPacking, bool kPairs, class Form, int N>
__device__ __forceinline__ void packed_tile(const PackedRowsArgs& args, const int* source, uint8_t* shared,
                                            int group, int expert, int begin, int rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int warp_k = warp % Form::kWarpsK, warp_m = warp / Form::kWarpsK;
  const int blocks = (args.width + 63) / 64, rounds = (blocks + Form::kBlocks - 1) / Form::kBlocks;
  PackedReader<kPacking> reader;
  reader.width = args.width;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const PackedMatrix& matrix = kPairs && m == 1 ? args.second : args.first;
      const int feature = (group * Form::kWarpsM + warp_m) * (kPairs ? 16 : 32) + (kPairs ? 0 : m * 16);
      const int64_t row = int64_t(expert) * args.features + min(feature + g + h * 8, args.features - 1);
      reader.row[m][h] = matrix.values + row * packed_bytes<kPacking>(args.width);
      reader.scale[m][h] = static_cast<const uint8_t*>(matrix.scales) + row * (args.width / 32);
    }
  }
  float d[2][N / 8][4] = {};
  PackedBlock<kPacking> now[Form::kUnroll], next[Form::kUnroll];
  const auto load = [&](int round, PackedBlock<kPacking>(&to)[Form::kUnroll]) {
#pragma unroll
    for (int u = 0; u < Form::kUnroll; ++u)
      to[u] = reader.load(round * Form::kBlocks + u * Form::kWarpsK + warp_k);
  };
  load(0, now);
  stage_rows<kPacking, Form, N>(args, source, 0, shared);
  __syncthreads();
  for (int round = 0; round < rounds; ++round) {
    if (round + 1 < rounds) {
      load(round + 1, next);
      stage_rows<kPacking, Form, N>(args, source, (round + 1) * Form::kBlocks,
                                    shared + (round + 1) % 2 * Form::kPanel);
    }
    const uint8_t* x = shared + round % 2 * Form::kPanel + g * Form::kRowBytes + q * 32;
#pragma unroll
    for (int u = 0; u < Form::kUnroll; ++u)
      multiply_block<kPacking, N>(now[u], x + (u * Form::kWarpsK + warp_k) * 128, Form::kRowBytes, d);
    __syncthreads();
#pragma unroll
    for (int u = 0; u < Form::kUnroll; ++u) now[u] = next[u];
  }
  float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = n * 8 + q * 2 + i % 2;
        sums[(warp_k * Form::kMostRows + row) * Form::kSumStride + warp_m * 32 + m * 16 + g + i / 2 * 8] =
            d[m][n][i];
      }
    }
  }
  __syncthreads();
  finish_rows<kPacking, kPairs, Form, N>(args, sums, group, expert, begin, rows);
}

// A group of features and a tile of rows.
template <Packing kPacking, bool kPairs, class Form>
__device__ __forceinline__ void packed_block(const PackedRowsArgs& args, int group, int t) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ int source[Form::kMostRows];
  int expert = 0, begin = t * Form::kMostRows, rows = min(Form::kMostRows, args.rows - begin);
  if (args.tiles != nullptr) {
    if (t >= args.totals[1]) return;
    const RowTile tile = args.tiles[t];
    expert = tile.expert, begin = tile.begin, rows = tile.rows;
  }
  const int r = threadIdx.x;
  bool used = false;
  if (r < Form::kMostRows) {
    const int slot = r < rows && args.tiles != nullptr ? args.row_slot[begin + r] : -1;
    used = r < rows && (args.tiles == nullptr || slot >= 0);
    source[r] = !used ? -1 : args.k > 0 ? slot / args.k : begin + r;
  }
  rows = __syncthreads_count(used);
  const auto tile = [&]<int N>() {
    packed_tile<kPacking, kPairs, Form, N>(args, source, shared, group, expert, begin, rows);
  };
  if (rows <= 8) {
    tile.template operator()<8>();
  } else if (rows <= 16) {
    tile.template operator()<16>();
  } else if constexpr (Form::kMostRows > 16) {
    if (rows <= 32) {
      tile.template operator()<32>();
    } else if constexpr (Form::kMostRows > 32) {
      tile.template operator()<64>();
    }
  }
}

// Grid: groups of features, tiles.
template <Packing kPacking, bool kPairs, class Form>
__global__ void __launch_bounds__(128) packed_rows_kernel(const __grid_constant__ PackedRowsArgs args) {
  packed_block<kPacking, kPairs, Form>(args, blockIdx.x, blockIdx.y);
}

// Several matrices on the same rows. Blocks of the same weights run together: tiles are the faster index.
struct PackedListArgs {
  static constexpr int kMost = 8;
  PackedRowsArgs base;
  int count = 0, tiles = 0;
  PackedMatrix matrix[kMost];
  int features[kMost] = {};
  __nv_bfloat16* out[kMost] = {};
  int first[kMost] = {};  // group of features of each
};
template <Packing kPacking, class Form>
__global__ void __launch_bounds__(128) packed_list_kernel(const __grid_constant__ PackedListArgs list) {
  const int group = blockIdx.x / list.tiles;
  int i = 0;
  while (i + 1 < list.count && group >= list.first[i + 1]) ++i;
  PackedRowsArgs args = list.base;
  args.first = list.matrix[i], args.features = list.features[i], args.out = list.out[i];
  packed_block<kPacking, false, Form>(args, group - list.first[i], blockIdx.x % list.tiles);
}

// Sets first and tiles.
template <Packing kPacking, class Form>
cudaError_t launch_packed_list(PackedListArgs list, cudaStream_t stream) {
  int groups = 0;
  for (int i = 0; i < list.count; ++i) {
    list.first[i] = groups;
    groups += (list.features[i] + Form::kWarpsM * 32 - 1) / (Form::kWarpsM * 32);
  }
  list.tiles = (list.base.rows + Form::kMostRows - 1) / Form::kMostRows;
  const auto kernel = packed_list_kernel<kPacking, Form>;
  const int shared = Form::shared_bytes(list.base.width);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(groups * list.tiles), 128, shared, stream>>>(list);
  return cudaGetLastError();
}

template <Packing kPacking, bool kPairs, class Form>
cudaError_t launch_packed_rows(const PackedRowsArgs& args, int64_t tiles, cudaStream_t stream) {
  constexpr int kFeatures = Form::kWarpsM * (kPairs ? 16 : 32);
  const auto kernel = packed_rows_kernel<kPacking, kPairs, Form>;
  const int shared = Form::shared_bytes(args.width);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  kernel<<<dim3((args.features + kFeatures - 1) / kFeatures, unsigned(tiles)), 128, shared, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
