#include "godwit/kernels/cuda/sm90/experts_mxfp4.cuh"

#include "godwit/kernels/cuda/sm90/experts_launch.cuh"
#include "godwit/kernels/cuda/sm90/experts_mxfp4_few.cuh"

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

// One product: w (pairs: and a second one) by rows x.
struct PackedCall {
  PackedWeight w[2];
  const void* x = nullptr;
  void* out = nullptr;
  GluForm form;
};

// The second product's kernel may start while the first one ends.
template <bool kPairs, int kRows>
cudaError_t launch_few(const PackedArgs& args, cudaStream_t stream) {
  return launch_persistent(few_kernel<kPairs, kRows>, args, kFewThreads, FewLayout<kRows>::kShared, stream,
                           /*each=*/2, /*overlap=*/!kPairs);
}

template <bool kPairs>
cudaError_t launch_packed(const ExpertPlan& plan, int64_t tokens, const PackedCall& call,
                          cudaStream_t stream) {
  const bool few = tokens <= kFewTokens, fewer = tokens <= 8;
  const int64_t features = call.w[0].rows, width = call.w[0].width;
  const int64_t tile = (few ? 64 : kTileA) / (kPairs ? 2 : 1);
  PackedArgs args;
  args.base.tiles = plan.tiles, args.base.totals = plan.totals;
  args.base.a_tiles = int((features + tile - 1) / tile), args.base.features = int(features);
  args.base.k_blocks = int(width / (few ? kFewK : kPackedK));
  args.base.out = static_cast<__nv_bfloat16*>(call.out);
  args.base.form = call.form;
  cudaError_t error = few ? row_map(&args.base.x32, plan, call.x, width, fewer ? 8 : 16)
                          : row_maps(&args.base, plan, call.x, width);
  for (int i = 0; i < (kPairs ? 2 : 1) && error == cudaSuccess; ++i)
    error = few ? few_maps(&args, i, call.w[i], kPairs) : packed_maps(&args, i, call.w[i]);
  if (error != cudaSuccess) return error;
  if (!few) return launch_persistent(packed_kernel<kPairs>, args, kProductThreads, kPackedShared, stream);
  return fewer ? launch_few<kPairs, 8>(args, stream) : launch_few<kPairs, 16>(args, stream);
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
  const int64_t experts = shape.experts, rows = shape.inner, width = shape.width;
  return launch_packed<true>(plan, shape.tokens,
                             {.w = {{w.w1, w.s1, experts, rows, width}, {w.w3, w.s3, experts, rows, width}},
                              .x = x,
                              .out = h,
                              .form = shape.form},
                             stream);
}

cudaError_t launch_packed_out_product(const ExpertPlan& plan, const MoeShape& shape, const MoeWeights& w,
                                      const void* h, void* y, cudaStream_t stream) {
  return launch_packed<false>(
      plan, shape.tokens,
      {.w = {{w.w2, w.s2, shape.experts, shape.width, shape.inner}}, .x = h, .out = y, .form = {}}, stream);
}

}  // namespace godwit::kernels::cuda::sm90
