// From both products of the gated unit and the gradient da of its unweighted output, with p the weight of a
// row's slot (moe_experts.cu):
//   d_gate_up = p da dglu,  act = p a,  d_weights[slot] = sum over the features of da a
// A block takes a row. The bits of a row depend on nothing but the row.
#include "godwit/kernels/cuda/sm90/experts_launch.cuh"
#include "godwit/kernels/cuda/sm90/glu.cuh"
#include "godwit/kernels/cuda/sm90/rows.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    glu_gradient_kernel(ExpertPlan plan, const __grid_constant__ GluGradientCall g, GluForm glu_form,
                        int units) {
  __shared__ float sums[kThreads / 32];
  const int64_t row = blockIdx.x;
  if (row >= plan.totals[0]) return;
  const GluConstants form(glu_form);
  const int slot = plan.row_slot[row];
  const float p = slot >= 0 ? g.weights[slot] : 0.f;
  const uint4* gate_up = static_cast<const uint4*>(g.gate_up) + row * 2 * units;
  uint4* act = static_cast<uint4*>(g.act) + row * units;
  uint4* d_gate_up = static_cast<uint4*>(g.d_gate_up) + row * 2 * units;
  float dot = 0;
  for (int u = threadIdx.x; u < units; u += kThreads) {
    const Eight gate = unpack(__ldcs(gate_up + u)), up = unpack(__ldcs(gate_up + units + u)),
                da = unpack(act[u]);
    Eight d_gate, d_up, a;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const GluGradient d = glu_gradient(gate.x[i], up.x[i], form);
      dot = fmaf(da.x[i], d.value, dot);
      d_gate.x[i] = p * da.x[i] * d.d_gate, d_up.x[i] = p * da.x[i] * d.d_up, a.x[i] = p * d.value;
    }
    d_gate_up[u] = pack(d_gate), d_gate_up[units + u] = pack(d_up), act[u] = pack(a);
  }
  if (g.d_weights == nullptr || slot < 0) return;
  dot = lane_sum(dot);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = dot;
  __syncthreads();
  if (threadIdx.x == 0) g.d_weights[slot] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

cudaError_t launch_glu_gradient(const ExpertPlan& plan, const MoeShape& shape, const GluGradientCall& g,
                                cudaStream_t stream) {
  glu_gradient_kernel<<<unsigned(plan.max_rows), kThreads, 0, stream>>>(plan, g, shape.form,
                                                                        int(shape.inner / 8));
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
