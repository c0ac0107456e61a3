// Absorbed latent attention of one query a sequence over paged rows: o_h = sum_r softmax_r(q_h . row_r scale) row_r[:R].
//
// A CTA takes 16 heads of one sequence and every `splits`-th share of its pages; all heads use the rows of a page
// while they lie in shared memory, so a row is read from memory once for 16 heads. Pages of 64 rows arrive two deep
// by cp.async. Per page, with mma.m16n8k16 (bf16, fp32 sums):
//   S [16, 64] = Q rows^T   warp w: rows 16 w .. 16 w + 15
//   online softmax in base 2, a warp four heads; P in bf16
//   O [16, R] += P rows[:, :R]   warp w: columns w R / 4 ...
// Shares leave unnormalised O with maximum and sum; a second kernel merges them. Shares are cut by the sequence's
// own length inside the kernel: a launch does not depend on it.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "godwit/kernels/mla_decode_params.h"

namespace godwit::kernels::cuda {
namespace {

constexpr int kHeads = 16, kRows = 64, kWarps = 4, kThreads = 32 * kWarps, kStages = 2;
constexpr int kPad = 8;              // bf16 behind a row in shared memory: no bank conflicts
constexpr int kMaxTiles = 16;        // of 8 columns of O a warp: rank 512
constexpr int kMaxSplits = 256;
constexpr float kNone = -1e30f;      // maximum of no rows

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
template <int kLeft>
__device__ __forceinline__ void wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft));
}

// c += a b: a 16x16 row-major, b 16x8 column-major.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Rows k of a row-major block as the b of an mma: lanes 0-15 give the addresses of 16 rows of 8.
__device__ __forceinline__ void load_rows_as_b(uint32_t (&b)[2], const __nv_bfloat16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(shared_address(row)));
}
__device__ __forceinline__ uint32_t pair_at(const __nv_bfloat16* p) { return *reinterpret_cast<const uint32_t*>(p); }
// A 16x16 block of a row-major matrix as the a of an mma.
__device__ __forceinline__ void load_a(uint32_t (&a)[4], const __nv_bfloat16* block, int stride, int lane) {
  const __nv_bfloat16* p = block + (lane / 4) * stride + (lane % 4) * 2;
  a[0] = pair_at(p), a[1] = pair_at(p + 8 * stride), a[2] = pair_at(p + 8), a[3] = pair_at(p + 8 * stride + 8);
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}

struct Layout {  // of shared memory, in bytes
  int row, q, stage, scores, weights, correction, total;
  __host__ __device__ explicit Layout(int D) {
    row = (D + kPad) * 2;
    q = 0;
    stage = kHeads * row;
    scores = stage + kStages * kRows * row;
    weights = scores + kHeads * (kRows + 4) * 4;
    correction = weights + kHeads * (kRows + kPad) * 2;
    total = correction + kHeads * 4;
  }
};

// Work: O [N, H, splits, R] fp32, then maximum and sum [N, H, splits, 2].
struct Shares {
  float* values;
  float* statistics;
};
__host__ __device__ Shares shares_of(const MlaDecodeParams& p, int splits) {
  auto* work = static_cast<float*>(p.workspace);
  return {work, work + int64_t(p.N) * p.H * splits * p.rank};
}

// Shares a sequence: enough CTAs for the whole card, twice.
__host__ __device__ inline int splits_of(const MlaDecodeParams& p) {
  const int others = p.N * ((p.H + kHeads - 1) / kHeads);
  const int wanted = (264 + others - 1) / others;
  return wanted < 1 ? 1 : wanted > kMaxSplits ? kMaxSplits : wanted;
}

// 16 numbers of e4m3 as bf16, which holds them exactly.
__device__ __forceinline__ void widen16(uint4 (&to)[2], uint4 from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
    const __half2 halves(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3));
    const __nv_bfloat162 wide = __float22bfloat162_rn(__half22float2(halves));
    pairs[i] = *reinterpret_cast<const uint32_t*>(&wide);
  }
  to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// A page of bytes on its way to shared memory: asked for while the page before is worked on, widened after.
constexpr int kBytesAThread = kRows * 576 / 16 / kThreads;
struct BytePage {
  uint4 raw[kBytesAThread];
};
__device__ __forceinline__ void fetch_bytes(BytePage& to, const MlaDecodeParams& p, int n, int64_t page, int64_t length) {
  const int vectors = p.D / 16;
  const auto* from = static_cast<const uint8_t*>(p.pages) + int64_t(p.table[n * p.table_stride + page]) * kRows * p.D;
#pragma unroll
  for (int j = 0; j < kBytesAThread; ++j) {
    const int i = threadIdx.x + j * kThreads, r = i / vectors, c = i % vectors;
    const bool seen = r < kRows && page * kRows + r < length;  // whatever else lies there, NaN too, has weight 0
    to.raw[j] = seen ? *reinterpret_cast<const uint4*>(from + r * p.D + c * 16) : make_uint4(0, 0, 0, 0);
  }
}
__device__ __forceinline__ void place_bytes(const BytePage& from, const MlaDecodeParams& p, const Layout& at, char* smem,
                                            int stage) {
  const int vectors = p.D / 16;
  char* to = smem + at.stage + stage * kRows * at.row;
#pragma unroll
  for (int j = 0; j < kBytesAThread; ++j) {
    const int i = threadIdx.x + j * kThreads, r = i / vectors, c = i % vectors;
    if (r >= kRows) continue;
    uint4 wide[2];
    widen16(wide, from.raw[j]);
    auto* row = reinterpret_cast<uint4*>(to + r * at.row + c * 32);
    row[0] = wide[0], row[1] = wide[1];
  }
}

__device__ __forceinline__ void load_page(const MlaDecodeParams& p, const Layout& at, char* smem, int stage, int n,
                                          int64_t page, int64_t length) {
  const int vectors = p.D / 8;
  const auto* from = static_cast<const __nv_bfloat16*>(p.pages) +
                     int64_t(p.table[n * p.table_stride + page]) * kRows * p.D;
  char* to = smem + at.stage + stage * kRows * at.row;
  for (int i = threadIdx.x; i < kRows * vectors; i += kThreads) {
    const int r = i / vectors, c = i % vectors;
    if (page * kRows + r < length) {
      copy16(to + r * at.row + c * 16, from + r * p.D + c * 8);
    } else {  // whatever lies there, NaN too, has weight 0
      *reinterpret_cast<uint4*>(to + r * at.row + c * 16) = make_uint4(0, 0, 0, 0);
    }
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kThreads) share_kernel(MlaDecodeParams p, int splits) {
  extern __shared__ __align__(16) char smem[];
  const Layout at(p.D);
  const int split = blockIdx.x, first_head = blockIdx.y * kHeads, n = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, stride = p.D + kPad;
  const int64_t length = p.lengths[n];
  const int64_t visible = p.window > 0 && length > p.window ? length - p.window : 0;
  const int64_t first_page = visible / kRows, pages = (length + kRows - 1) / kRows - first_page;
  const int64_t begin = first_page + pages * split / splits, end = first_page + pages * (split + 1) / splits;

  auto* q = reinterpret_cast<__nv_bfloat16*>(smem + at.q);
  auto* scores = reinterpret_cast<float*>(smem + at.scores);
  auto* weights = reinterpret_cast<__nv_bfloat16*>(smem + at.weights);
  auto* correction = reinterpret_cast<float*>(smem + at.correction);
  BytePage bytes;
  if (begin < end) {
    if constexpr (kFp8) {
      fetch_bytes(bytes, p, n, begin, length);
      place_bytes(bytes, p, at, smem, 0);
    } else {
      load_page(p, at, smem, 0, n, begin, length);
    }
  }
  commit();
  for (int i = threadIdx.x; i < kHeads * p.D / 8; i += kThreads) {
    const int h = i / (p.D / 8), c = i % (p.D / 8), head = first_head + h;
    const auto* from = reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.q) +
                                                      (int64_t(n) * p.H + head) * p.D);
    reinterpret_cast<uint4*>(q + h * stride)[c] = head < p.H ? from[c] : make_uint4(0, 0, 0, 0);
  }
  float o[kMaxTiles][4] = {};
  float top[4], sum[4];  // of heads 4 warp .. 4 warp + 3
  for (int i = 0; i < 4; ++i) top[i] = kNone, sum[i] = 0;
  const float scale = p.scale * 1.4426950408889634f;
  const int tiles = p.rank / 32;  // of 8 columns, a warp
  for (int64_t page = begin; page < end; ++page) {
    const int stage = static_cast<int>((page - begin) % kStages);
    if (page + 1 < end) {
      if constexpr (kFp8)
        fetch_bytes(bytes, p, n, page + 1, length);
      else
        load_page(p, at, smem, 1 - stage, n, page + 1, length);
    }
    commit();
    wait_for<1>();
    __syncthreads();
    const auto* rows = reinterpret_cast<const __nv_bfloat16*>(smem + at.stage + stage * kRows * at.row);
    float s[2][4] = {};
    for (int d = 0; d < p.D; d += 16) {
      uint32_t a[4];
      load_a(a, q + d, stride, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const __nv_bfloat16* row = rows + (warp * 16 + half * 8 + lane / 4) * stride + d + (lane % 4) * 2;
        const uint32_t b[2] = {pair_at(row), pair_at(row + 8)};
        mma(s[half], a, b);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = lane / 4 + i / 2 * 8, r = warp * 16 + half * 8 + (lane % 4) * 2 + i % 2;
        const int64_t position = page * kRows + r;
        scores[head * (kRows + 4) + r] = position >= visible && position < length ? s[half][i] * scale : kNone;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = warp * 4 + i;
      const float x = scores[head * (kRows + 4) + lane], y = scores[head * (kRows + 4) + lane + 32];
      const float now = fmaxf(top[i], warp_max(fmaxf(x, y)));
      const float before = exp2f(top[i] - now);
      const __nv_bfloat16 wx = __float2bfloat16(x <= kNone ? 0.f : exp2f(x - now)),
                          wy = __float2bfloat16(y <= kNone ? 0.f : exp2f(y - now));
      weights[head * (kRows + kPad) + lane] = wx, weights[head * (kRows + kPad) + lane + 32] = wy;
      sum[i] = sum[i] * before + warp_sum(__bfloat162float(wx) + __bfloat162float(wy));
      top[i] = now;
      if (lane == 0) correction[head] = before;
    }
    __syncthreads();
    const float low = correction[lane / 4], high = correction[lane / 4 + 8];
#pragma unroll
    for (int tile = 0; tile < kMaxTiles; ++tile) {
      if (tile < tiles) o[tile][0] *= low, o[tile][1] *= low, o[tile][2] *= high, o[tile][3] *= high;
    }
#pragma unroll
    for (int k = 0; k < kRows; k += 16) {
      uint32_t a[4];
      load_a(a, weights + k, kRows + kPad, lane);
#pragma unroll
      for (int tile = 0; tile < kMaxTiles; ++tile) {
        if (tile >= tiles) continue;
        uint32_t b[2];
        load_rows_as_b(b, rows + (k + lane % 16) * stride + (warp * tiles + tile) * 8);
        mma(o[tile], a, b);
      }
    }
    if constexpr (kFp8) {  // the other stage, which all have left before the barriers above
      if (page + 1 < end) place_bytes(bytes, p, at, smem, 1 - stage);
    }
    __syncthreads();  // the stage and the weights may be written again
  }
  wait_for<0>();
  const Shares out = shares_of(p, splits);
#pragma unroll
  for (int tile = 0; tile < kMaxTiles; ++tile) {
    if (tile >= tiles) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = first_head + lane / 4 + half * 8;
      if (head >= p.H) continue;
      const int64_t share = (int64_t(n) * p.H + head) * splits + split;
      *reinterpret_cast<float2*>(out.values + share * p.rank + (warp * tiles + tile) * 8 + (lane % 4) * 2) =
          make_float2(o[tile][2 * half], o[tile][2 * half + 1]);
    }
  }
  for (int i = 0; i < 4; ++i) {
    const int head = first_head + warp * 4 + i;
    if (lane != 0 || head >= p.H) continue;
    const int64_t share = (int64_t(n) * p.H + head) * splits + split;
    out.statistics[2 * share] = top[i], out.statistics[2 * share + 1] = sum[i];
  }
}

// One CTA a head of a sequence.
__global__ void merge_kernel(MlaDecodeParams p, int splits) {
  __shared__ float factor[kMaxSplits];
  const int64_t row = blockIdx.x;
  const Shares in = shares_of(p, splits);
  const float* statistics = in.statistics + row * splits * 2;
  float top = kNone, sum = 0;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, statistics[2 * s]);
  for (int s = 0; s < splits; ++s) sum += statistics[2 * s + 1] * exp2f(statistics[2 * s] - top);
  for (int s = threadIdx.x; s < splits; s += blockDim.x)
    factor[s] = statistics[2 * s + 1] > 0 ? exp2f(statistics[2 * s] - top) / sum : 0.f;
  __syncthreads();
  for (int c = threadIdx.x; c < p.rank; c += blockDim.x) {
    float y = 0;
    for (int s = 0; s < splits; ++s) {
      if (factor[s] > 0) y += factor[s] * in.values[(row * splits + s) * p.rank + c];
    }
    static_cast<__nv_bfloat16*>(p.o)[row * p.rank + c] = __float2bfloat16(y);
  }
}

}  // namespace

bool mla_decode_supports(int width, int rank, int page_rows) {
  return page_rows == kRows && width % 64 == 0 && width <= 576 && rank % 64 == 0 && rank <= 8 * 4 * kMaxTiles &&
         rank <= width;
}

size_t mla_decode_workspace_bytes(const MlaDecodeParams& p) {
  return size_t(p.N) * p.H * splits_of(p) * (p.rank + 2) * sizeof(float);
}

int mla_decode(const MlaDecodeParams& p) {
  if (p.N == 0 || p.H == 0) return cudaSuccess;
  const int splits = splits_of(p), shared = Layout(p.D).total;
  auto* stream = static_cast<cudaStream_t>(p.stream);
  const auto kernel = p.fp8 ? share_kernel<true> : share_kernel<false>;
  if (const auto error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
    return error;
  kernel<<<dim3(splits, (p.H + kHeads - 1) / kHeads, p.N), kThreads, shared, stream>>>(p, splits);
  merge_kernel<<<p.N * p.H, 128, 0, stream>>>(p, splits);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda
