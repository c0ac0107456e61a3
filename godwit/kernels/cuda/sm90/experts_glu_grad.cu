#include "godwit/kernels/cuda/sm90/experts_gemm.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

// d_weights[slot] = the parts of its row's dot product, in order.
__global__ void sum_dots_kernel(const int* slot_row, int64_t slots, const float* dots, int parts,
                                int64_t max_rows, float* d_weights) {
  const int64_t slot = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  const int64_t row = slot_row[slot];
  float sum = 0;
  for (int i = 0; i < parts; ++i) sum += dots[i * max_rows + row];
  d_weights[slot] = sum;
}

int dot_parts(const MoeShape& shape) {
  return 2 * int((shape.inner + 127) / 128);
}

}  // namespace

size_t glu_gradient_dots(const ExpertPlan& plan, const MoeShape& shape) {
  return size_t(dot_parts(shape)) * plan.max_rows;
}

cudaError_t launch_glu_gradient(const ExpertPlan& plan, const MoeShape& shape, const GluGradientCall& g,
                                cudaStream_t stream) {
  ProductArgs args;
  args.tiles = plan.tiles, args.totals = plan.totals;
  args.a_tiles = int((shape.inner + 127) / 128);
  args.k_blocks = int((shape.width + kBlockK - 1) / kBlockK);
  args.features = int(shape.inner);
  args.form = shape.form;
  args.grad = {.d_act = static_cast<const __nv_bfloat16*>(g.d_act),
               .row_slot = plan.row_slot,
               .weights = g.weights,
               .d_gate_up = static_cast<__nv_bfloat16*>(g.d_gate_up),
               .act = static_cast<__nv_bfloat16*>(g.act),
               .dots = g.dots,
               .max_rows = plan.max_rows};
  cudaError_t error = row_maps(&args, plan, g.x, shape.width);
  if (error == cudaSuccess) error = weight_map(&args.a[0], g.w1, shape.experts, shape.inner, shape.width);
  if (error == cudaSuccess) error = weight_map(&args.a[1], g.w3, shape.experts, shape.inner, shape.width);
  if (error == cudaSuccess) error = launch_product<Product::kGluGrad>(args, stream);
  if (error != cudaSuccess || g.d_weights == nullptr) return error;
  sum_dots_kernel<<<unsigned((plan.slots + 255) / 256), 256, 0, stream>>>(
      plan.slot_row, plan.slots, g.dots, dot_parts(shape), plan.max_rows, g.d_weights);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
