// The serial part of the KDA backward, last chunk first. As in the forward (kda_state.cu), value columns are
// independent: a warpgroup owns 64 of them and keeps dS^T [64 V x 128 K], the gradient of the state that
// leaves a chunk, in fp32 registers. Per chunk:
//   record bf16 dS'^T for the gradient kernel
//   dU^T = dS'^T Kr^T + dO^T M       wgmma, 8 of m64n16k16, and mma.sync
//   dX^T = dU^T R diag(beta)         = dV^T, stored
//   dS^T = dS'^T diag(decay) + dO^T Qd - dX^T Kd      wgmma, 2 of m64n128k16
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"
#include "godwit/kernels/cuda/sm90/kda_state_common.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

template <int kGroups>
__global__ void __launch_bounds__(kGroups * 128, 1) bwd_state_kernel(const __grid_constant__ KdaBwdArgs a) {
  using Shared = StateShared<kGroups, true>;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  constexpr int kSplits = kWidth / Shared::kColumns;  // neighbours share the operand blocks through L2
  const int head = blockIdx.x / kSplits, n = blockIdx.y, warp = uniform(threadIdx.x >> 5),
            lane = threadIdx.x & 31;
  Span span;
  span.begin = sequence_begin(a.in, n), span.end = sequence_begin(a.in, n + 1);
  span.first_chunk = kda_first_unit(span.begin, n, kChunk);
  span.chunks = uniform(int((span.end - span.begin + kChunk - 1) / kChunk));
  span.step = -1;
  init_stages(shared);
  const int mine = blockIdx.x % kSplits * Shared::kColumns + warp * 16;
  RowWalk walk(a.in.H, span, head, lane >> 1, mine + (lane & 1) * 8);
  const uint32_t slices = smem_address(shared.v[0][warp]) + narrow_offset(lane >> 1, lane & 1),
                 out = smem_address(shared.out[warp]);
  constexpr uint32_t kSlice = Shared::kWarps * 512;  // bytes from stage to stage
  for (uint32_t c = 0; c < kStages - 1; ++c) {
    if (warp == 0) fetch_block<true>(a.blocks, a.in.H, span, shared, head, c, lane);
    fetch_slice(a.d_o, a.in.H, walk, -1, c, c < uint32_t(span.chunks), true, slices + c * kSlice);
  }
  float s[16][4] = {};
  const int64_t state_at = (int64_t(n) * a.in.H + head) * kWidth * kWidth + mine;
  if (a.d_final_state) load_state(s, a.d_final_state + state_at, kWidth, lane);
  const uint32_t d_at =
      smem_address(shared.v[0][warp]) + narrow_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  const int trans_at = narrow_offset((lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4);
  for (uint32_t c = 0; c < uint32_t(span.chunks); ++c) {
    const uint32_t st = c % kStages;
    const uint32_t block = smem_address(shared.block[st]);
    const int64_t chunk = span.chunk(int(c));
    uint32_t f[8][4], d[4], b[4], r[4];
    float x[2][4];
    wgmma_wait<0>();  // as in kda_state.cu
    pin(s);
    pack_steps(f, s, 0);
    mbarrier_wait(&shared.full[st], (c / kStages) & 1);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 8; ++k)
      wgmma_rows(x, f[k],
                 wgmma_descriptor(block + Block::kKr + (k >> 2) * Block::kPanel + (k & 3) * 32, 1024, 0),
                 k > 0);
    wgmma_commit();
    record_state(f, shared.record + warp * 4096,
                 a.chunk_gradients + (chunk * a.in.H + head) * (kWidth * kWidth * 2) + mine * kWidth * 2,
                 lane);
    wait_slice();
    ldmatrix_x4_trans(d, d_at + st * kSlice);
    ldmatrix_x4_trans(b, block + Block::kM + trans_at);
    scale_state(s, shared.block[st] + Block::kDecay + (lane & 3) * Block::kDecayRow);
    wgmma_wait<0>();
    pin(x);
    mma_bf16(x[0], d, b[0], b[1]);
    mma_bf16(x[1], d, b[2], b[3]);
    pack_rows(r, x[0], x[1]);
    ldmatrix_x4_trans(b, block + Block::kR + trans_at);
    mma_bf16(x[0], r, b[0], b[1]);  // R - I: the diagonal stays fp32
    mma_bf16(x[1], r, b[2], b[3]);
    const LaneBeta beta(shared.block[st], lane);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] *= beta.at(j, i & 1);
    pack_rows(r, x[0], x[1]);
    const uint32_t minus[4] = {r[0] ^ 0x80008000u, r[1] ^ 0x80008000u, r[2] ^ 0x80008000u,
                               r[3] ^ 0x80008000u};
    pin(s);
    wgmma_fence();
    wgmma_n128_trans(s, d, wgmma_descriptor(block + Block::kQd, 1024, Block::kPairPanel));
    wgmma_n128_trans(s, minus, wgmma_descriptor(block + Block::kKd, 1024, Block::kPairPanel));
    wgmma_commit();
    write_rows(r, out, a.dv, walk, lane);
    if (warp == 0) fetch_block<true>(a.blocks, a.in.H, span, shared, head, c + kStages - 1, lane);
    fetch_slice(a.d_o, a.in.H, walk, -1, kStages - 1, c + kStages - 1 < uint32_t(span.chunks), true,
                slices + (c + kStages - 1) % kStages * kSlice);
    walk.advance(a.in.H, -1);
    wgmma_wait<0>();
    pin(s);
    release_block(shared, st, lane);
  }
  if (a.d_initial_state) store_state(s, a.d_initial_state + state_at, kWidth, lane);
  if (lane == 0) bulk_wait_read<0>();
}

template <int kGroups>
cudaError_t launch(const KdaBwdArgs& a, cudaStream_t stream) {
  using Shared = StateShared<kGroups, true>;
  const auto kernel = bwd_state_kernel<kGroups>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e != cudaSuccess) return e;
  kernel<<<dim3(a.in.H * (kWidth / Shared::kColumns), a.in.N), kGroups * 128, sizeof(Shared), stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_bwd_state(const KdaBwdArgs& a, cudaStream_t stream) {
  return int64_t(a.in.H) * a.in.N <= 66 ? launch<1>(a, stream) : launch<2>(a, stream);  // as in kda_state.cu
}

}  // namespace godwit::kernels::cuda::sm90
