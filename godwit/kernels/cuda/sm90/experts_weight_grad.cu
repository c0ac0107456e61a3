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

template <int N>
cudaError_t launch(WeightGradArgs args, cudaStream_t stream) {
  args.n_tiles = (args.n + N - 1) / N;
  return launch_persistent(weight_grad_kernel<N>, args, kProductThreads, GradLayout<N>::kShared, stream);
}

}  // namespace

cudaError_t launch_weight_gradient(const ExpertPlan& plan, int experts, const Rows& a, const Rows& b,
                                   void* out, cudaStream_t stream) {
  WeightGradArgs args;
  args.ranges = plan.ranges, args.experts = experts;
  args.m = a.width, args.n = b.width;
  args.m_tiles = (a.width + 255) / 256;
  args.out = static_cast<__nv_bfloat16*>(out);
  cudaError_t error = grad_map(&args.a, plan, a);
  if (error == cudaSuccess) error = grad_map(&args.b, plan, b);
  if (error != cudaSuccess) return error;
  const bool wide = (b.width + 191) / 192 * 192 * 20 <= b.width * 21;  // little of the last tile is in vain
  return wide ? launch<192>(args, stream) : launch<128>(args, stream);
}

}  // namespace godwit::kernels::cuda::sm90
