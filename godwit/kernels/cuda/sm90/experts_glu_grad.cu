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
  cudaError_t error = glu_args(plan, shape, {.w1 = g.w1, .w3 = g.w3, .x = g.x}, &args);
  if (error != cudaSuccess) return error;
  args.grad = {.d_act = static_cast<const __nv_bfloat16*>(g.d_act),
               .gate_up = static_cast<__nv_bfloat16*>(const_cast<void*>(g.gate_up)),
               .row_slot = plan.row_slot,
               .weights = g.weights,
               .d_gate_up = static_cast<__nv_bfloat16*>(g.d_gate_up),
               .act = static_cast<__nv_bfloat16*>(g.act),
               .dots = g.dots,
               .max_rows = plan.max_rows};
  if (g.gate_up == nullptr) {
    error = launch_product<Product::kGluGrad>(args, stream);
  } else {
    error = launch_activation_gradient(plan, shape, g, args.grad, stream);
  }
  if (error != cudaSuccess || g.d_weights == nullptr) return error;
  sum_dots_kernel<<<unsigned((plan.slots + 255) / 256), 256, 0, stream>>>(
      plan.slot_row, plan.slots, g.dots, dot_parts(shape), plan.max_rows, g.d_weights);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
