#include "godwit/kernels/cuda/sm90/experts_grad.cuh"
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

cudaError_t grad_map(CUtensorMap* map, const ExpertPlan& plan, const Rows& x) {
  return make_tensor_map(map, {.base = x.data,
                               .size = {uint64_t(x.width), uint64_t(plan.max_rows), 1},
                               .stride = {uint64_t(x.stride), uint64_t(x.stride * plan.max_rows)},
                               .box = {64, 64, 1}});
}

}  // namespace

cudaError_t launch_weight_gradient(const ExpertPlan& plan, int experts, const Rows& a, const Rows& b,
                                   void* out, cudaStream_t stream) {
  WeightGradArgs args;
  args.ranges = plan.ranges, args.experts = experts;
  args.m = a.width, args.n = b.width;
  args.m_tiles = (a.width + 255) / 256, args.n_tiles = (b.width + kGradN - 1) / kGradN;
  args.out = static_cast<__nv_bfloat16*>(out);
  cudaError_t error = grad_map(&args.a, plan, a);
  if (error == cudaSuccess) error = grad_map(&args.b, plan, b);
  return error == cudaSuccess
             ? launch_persistent(weight_grad_kernel, args, kProductThreads, kGradShared, stream)
             : error;
}

}  // namespace godwit::kernels::cuda::sm90
