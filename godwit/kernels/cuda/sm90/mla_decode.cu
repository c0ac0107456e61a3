// mla_decode (mla_decode_cuda.h): how sequences are cut, and the merge of their parts.
#include "godwit/kernels/mla_decode_cuda.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "godwit/kernels/cuda/sm90/mla_decode.cuh"

namespace godwit::kernels::cuda {
namespace sm90 {
namespace {

// o = sum_i 2^(m_i - m) O_i / sum_i 2^(m_i - m) sum_i of one head, 128 latents a warp, four a lane.
struct Merged {
  float4 o = {0, 0, 0, 0};
  float sum = 0;
  __device__ void add(float4 x, float y) { o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w, sum += y; }
  __device__ void add_scaled(float4 x, float y, float scale) {
    o.x = fmaf(scale, x.x, o.x), o.y = fmaf(scale, x.y, o.y), o.z = fmaf(scale, x.z, o.z),
    o.w = fmaf(scale, x.w, o.w), sum = fmaf(scale, y, sum);
  }
};
struct PartsOfHead {
  const DecodeArgs& a;
  int64_t head, all;
  int lane, latent;
  float m = -INFINITY;
  __device__ PartsOfHead(const DecodeArgs& args, int chunk)
      : a(args),
        head(blockIdx.x),
        all(int64_t(args.sequences) * args.heads),
        lane(threadIdx.x % 32),
        latent(chunk * 128 + lane * 4) {
    for (int i = lane; i < a.cut.parts; i += 32) m = fmaxf(m, a.sums[i * all + head].x);
    for (int lanes = 1; lanes < 32; lanes *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, lanes));
  }
  // use(O_i, sum_i, scale) for i = first, first + step, ...; eight loads are on their way at once. A part
  // that had no pages left nothing behind.
  template <class Use>
  __device__ void each(int first, int step, const Use& use) const {
    constexpr int kBatch = 8;
    for (int from = first; from < a.cut.parts; from += kBatch * step) {
      float2 part[kBatch];
      float4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int at = from + i * step;
        part[i] = at < a.cut.parts ? a.sums[at * all + head] : float2{-INFINITY, 0.f};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        x[i] = {0, 0, 0, 0};
        if (part[i].x != -INFINITY)
          x[i] = *reinterpret_cast<const float4*>(a.o + ((from + i * step) * all + head) * a.rank + latent);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        use(x[i], part[i].y, part[i].x == -INFINITY ? 0.f : exp2_approx(part[i].x - m));
    }
  }
  __device__ void store(const Merged& x, __nv_bfloat16* out) const {
    const float inverse = x.sum > 0 ? 1.f / x.sum : 0.f;
    *reinterpret_cast<uint2*>(out + head * a.rank + latent) = {pack_bf16(x.o.x * inverse, x.o.y * inverse),
                                                               pack_bf16(x.o.z * inverse, x.o.w * inverse)};
  }
};

// One block a sequence, a head and 128 latents. The warps take parts in turn and are added in order.
constexpr int kMergeWarps = 16;
__global__ void __launch_bounds__(kMergeWarps * 32) merge_kernel(DecodeArgs a, __nv_bfloat16* out) {
  __shared__ Merged of_warp[kMergeWarps][32];
  const int warp = threadIdx.x / 32;
  wait_for_prerequisites();
  const PartsOfHead parts(a, blockIdx.y);
  Merged sum;
  parts.each(warp, kMergeWarps, [&](float4 x, float y, float scale) { sum.add_scaled(x, y, scale); });
  of_warp[warp][parts.lane] = sum;
  __syncthreads();
  if (warp != 0) return;
  for (int i = 1; i < kMergeWarps; ++i) {
    const Merged& x = of_warp[i][parts.lane];
    sum.add(x.o, x.sum);
  }
  parts.store(sum, out);
}

// The same for at most kMergeWarps parts, with the same bits: one block a sequence and a head, a warp for 128
// latents.
__global__ void __launch_bounds__(128) merge_few_kernel(DecodeArgs a, __nv_bfloat16* out) {
  wait_for_prerequisites();
  const PartsOfHead parts(a, threadIdx.x / 32);
  Merged sum;
  parts.each(0, 1, [&](float4 x, float y, float scale) {
    Merged one;  // the sum of a warp of merge_kernel
    one.add_scaled(x, y, scale);
    sum.add(one.o, one.sum);
  });
  parts.store(sum, out);
}

int group_count(int heads) {
  return (heads + kGroupHeads - 1) / kGroupHeads;
}
cudaError_t make_maps(const MlaDecodeParams& p, DecodeArgs* a) {
  const uint64_t width = p.rank + kMlaPositions, heads = p.heads;
  const cudaError_t error = make_tensor_map(&a->q, {.base = p.q,
                                                    .size = {width, heads, uint64_t(p.sequences)},
                                                    .stride = {width, width * heads},
                                                    .box = {64, 16, 1}});
  if (error != cudaSuccess) return error;
  return make_tensor_map(&a->x,
                         {.base = p.pages,
                          .size = {width, kMlaPageRows, uint64_t(p.page_count)},
                          .stride = {uint64_t(p.row_stride), uint64_t(p.page_stride)},
                          .box = {64, kMlaPageRows, 1}},
                         p.fp8 ? BoxType::kBytes : BoxType::kBf16Swizzled);
}

}  // namespace
}  // namespace sm90

bool mla_decode_supports(int64_t width, int64_t rank, int64_t page_rows) {
  return page_rows == kMlaPageRows && width == rank + kMlaPositions && (rank == 256 || rank == 512);
}

// Lengths known: what takes the least time, counted in pages; a part costs about three pages beside its own.
// Else as many parts as there are blocks for.
MlaCut mla_decode_cut(const MlaDecodeParams& p, int64_t pages) {
  constexpr int64_t kProcessors = 132, kExtra = 3;
  const int64_t items = std::max<int64_t>(1, int64_t(p.sequences) * sm90::group_count(p.heads));
  if (pages == 0) return {.part_pages = 0, .parts = int(std::max<int64_t>(1, kProcessors / items))};
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t parts = 1; parts <= std::min(kProcessors, std::max<int64_t>(1, pages / 2)); ++parts) {
    const int64_t each = (pages + parts - 1) / parts, waves = (items * parts + kProcessors - 1) / kProcessors;
    const int64_t cost = waves * (each + kExtra);
    if (cost < best_cost) best = each, best_cost = cost;
  }
  return {.part_pages = int(best), .parts = int((pages + best - 1) / best)};
}

size_t mla_decode_workspace_bytes(const MlaDecodeParams& p) {
  return size_t(p.cut.parts) * p.sequences * p.heads * (p.rank * sizeof(float) + sizeof(float2));
}

int mla_decode(const MlaDecodeParams& p) {
  using namespace sm90;
  if (p.sequences == 0 || p.heads == 0) return cudaSuccess;
  DecodeArgs a;
  a.table = p.table, a.table_stride = p.table_stride, a.lengths = p.lengths;
  a.sequences = p.sequences, a.heads = p.heads, a.groups = group_count(p.heads), a.rank = p.rank,
  a.cut = p.cut;
  a.window = p.window, a.scale = p.scale * 1.4426950408889634f;
  a.o = static_cast<float*>(p.workspace);
  a.sums = reinterpret_cast<float2*>(a.o + size_t(p.cut.parts) * p.sequences * p.heads * p.rank);
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = make_maps(p, &a);
  const auto launch = p.fp8 ? launch_decode_fp8 : launch_decode_groups;
  if (error == cudaSuccess) error = launch(a, processors, p.stream);
  if (error != cudaSuccess) return error;
  const unsigned rows = unsigned(p.sequences * p.heads), chunks = p.rank / 128;
  auto* const out = static_cast<__nv_bfloat16*>(p.o);
  return p.cut.parts <= kMergeWarps
             ? launch_after(merge_few_kernel, dim3(rows), chunks * 32, p.stream, a, out)
             : launch_after(merge_kernel, dim3(rows, chunks), kMergeWarps * 32, p.stream, a, out);
}

}  // namespace godwit::kernels::cuda
