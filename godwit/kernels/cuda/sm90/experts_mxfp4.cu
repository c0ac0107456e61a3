#include "godwit/kernels/cuda/sm90/experts_mxfp4.cuh"

#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

constexpr int kGatherThreads = 128;

// gather_kernel with every 128 values in the order of permuted_k.
__global__ void __launch_bounds__(kGatherThreads)
    gather_permuted_kernel(ExpertPlan plan, const uint4* source, int k, int units, uint4* rows) {
  extern __shared__ __align__(16) uint16_t values[];
  const int row = blockIdx.x;
  if (row >= plan.totals[0]) return;
  const int slot = plan.row_slot[row];
  const uint4* from = source + int64_t(max(slot, 0) / k) * units;
  for (int i = threadIdx.x; i < units; i += kGatherThreads)
    reinterpret_cast<uint4*>(values)[i] = slot < 0 ? uint4{0, 0, 0, 0} : from[i];
  __syncthreads();
  for (int i = threadIdx.x; i < units; i += kGatherThreads) {
    const uint16_t* block = values + i / 16 * 128;
    const int p = i % 16 * 8;
    uint32_t pair[4];
    for (int j = 0; j < 4; ++j)
      pair[j] = block[permuted_k(p + 2 * j)] | uint32_t(block[permuted_k(p + 2 * j + 1)]) << 16;
    rows[int64_t(row) * units + i] = {pair[0], pair[1], pair[2], pair[3]};
  }
}

PackedArgs packed_args(const ExpertPlan& plan, int a_tiles, int64_t width, int64_t features, void* out) {
  PackedArgs args;
  args.base.tiles = plan.tiles, args.base.totals = plan.totals;
  args.base.a_tiles = a_tiles, args.base.k_blocks = int(width / kPackedK), args.base.features = int(features);
  args.base.out = static_cast<__nv_bfloat16*>(out);
  return args;
}

template <bool kPairs, bool kFew>
cudaError_t launch_packed(const PackedArgs& args, cudaStream_t stream) {
  using Layout = PackedLayout<kFew>;
  return launch_persistent(packed_kernel<kPairs, kFew>, args, Layout::kThreads, Layout::kShared, stream,
                           Layout::kPerProcessor);
}
// One token's tiles are three and two rounds of larger blocks, which end sooner.
template <bool kPairs>
cudaError_t launch_packed(const PackedArgs& args, int64_t tokens, cudaStream_t stream) {
  return tokens > 1 && tokens <= kFewTokens ? launch_packed<kPairs, true>(args, stream)
                                            : launch_packed<kPairs, false>(args, stream);
}

}  // namespace

int packed_tile_rows() {
  return kPackedRows;
}

cudaError_t launch_gather_permuted(const ExpertPlan& plan, const void* source, int k, int width, void* rows,
                                   cudaStream_t stream) {
  gather_permuted_kernel<<<unsigned(plan.max_rows), kGatherThreads, width * 2, stream>>>(
      plan, static_cast<const uint4*>(source), k, width / 8, static_cast<uint4*>(rows));
  return cudaGetLastError();
}

cudaError_t launch_packed_glu_product(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                      const void* x, void* h, cudaStream_t stream) {
  PackedArgs args = packed_args(plan, int((shape.inner + 127) / 128), shape.width, shape.inner, h);
  args.base.form = shape.form;
  cudaError_t error = row_maps(&args.base, plan, x, shape.width);
  if (error == cudaSuccess)
    error = packed_maps(&args, 0, w.w1, w.s1, shape.experts, shape.inner, shape.width);
  if (error == cudaSuccess)
    error = packed_maps(&args, 1, w.w3, w.s3, shape.experts, shape.inner, shape.width);
  return error == cudaSuccess ? launch_packed<true>(args, shape.tokens, stream) : error;
}

cudaError_t launch_packed_out_product(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                      const void* h, void* y, cudaStream_t stream) {
  PackedArgs args = packed_args(plan, int((shape.width + kTileA - 1) / kTileA), shape.inner, shape.width, y);
  cudaError_t error = row_maps(&args.base, plan, h, shape.inner);
  if (error == cudaSuccess)
    error = packed_maps(&args, 0, w.w2, w.s2, shape.experts, shape.width, shape.inner);
  return error == cudaSuccess ? launch_packed<false>(args, shape.tokens, stream) : error;
}

}  // namespace godwit::kernels::cuda::sm90
