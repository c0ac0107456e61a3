// The serial part of the KDA backward, last chunk first. As in the forward (kda_state.cu), value columns are
// independent: a warpgroup owns 64 of them and keeps dS^T [64 V x 128 K], the gradient of the state that
// leaves a chunk, in fp32 registers. Per chunk:
//   record bf16 dS'^T for the gradient kernel
//   dU^T = dS'^T Kr^T + dO^T M       wgmma, 8 of m64n16k16, and mma.sync
//   dX^T = dU^T R diag(beta)         = dV^T, stored; and dX . U of each token, for the gradient of beta, from
//                                    dX as it is before it is rounded
//   dS^T = dS'^T diag(decay) + dO^T Qd - dX^T Kd      wgmma, 2 of m64n128k16
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"
#include "godwit/kernels/cuda/sm90/kda_state_common.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

template <int kGroups>
struct BwdShared : StateShared<kGroups, true> {
  alignas(128) uint8_t u[kStages][kGroups * 4][512];  // slices of U, as v holds those of dO
};

// Sums dX^T U^T over the warp's 16 columns (dx and u as accumulators) and stores a value a token.
__device__ __forceinline__ void store_beta_part(const float (&dx)[2][4], const uint32_t (&u)[4], float* to,
                                                int lane) {
  float sum[4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    sum[2 * j] = dx[j][0] * low_bf16(u[2 * j]) + dx[j][2] * low_bf16(u[2 * j + 1]);
    sum[2 * j + 1] = dx[j][1] * high_bf16(u[2 * j]) + dx[j][3] * high_bf16(u[2 * j + 1]);
  }
  // Over the eight lanes of equal lane % 4, halving the values on the way: lane bit 2 keeps tile j, bit 3 the
  // odd token.
  const bool tile = lane & 4, odd = lane & 8;
  const float give0 = tile ? sum[0] : sum[2], give1 = tile ? sum[1] : sum[3];
  const float even = (tile ? sum[2] : sum[0]) + __shfl_xor_sync(0xffffffffu, give0, 4);
  const float next = (tile ? sum[3] : sum[1]) + __shfl_xor_sync(0xffffffffu, give1, 4);
  const float give = odd ? even : next;
  float total = (odd ? next : even) + __shfl_xor_sync(0xffffffffu, give, 8);
  total += __shfl_xor_sync(0xffffffffu, total, 16);
  if (lane < 16) to[8 * tile + 2 * (lane & 3) + odd] = total;
}

template <int kGroups>
__global__ void __launch_bounds__(kGroups * 128, 1) bwd_state_kernel(const __grid_constant__ KdaBwdArgs a) {
  using Shared = BwdShared<kGroups>;
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
                 u_slices = slices + smem_address(shared.u) - smem_address(shared.v),
                 out = smem_address(shared.out[warp]);
  constexpr uint32_t kSlice = Shared::kWarps * 512;  // bytes from stage to stage
  for (uint32_t c = 0; c < kStages - 1; ++c) {
    if (warp == 0) fetch_block<true>(a.blocks, a.in.H, span, shared, head, c, lane);
    send_slice(a.u, a.in.H, walk, -1, c, c < uint32_t(span.chunks), true, u_slices + c * kSlice);
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
    uint32_t u[4];
    ldmatrix_x4_trans(u, d_at + (u_slices - slices) + st * kSlice);
    const uint32_t minus[4] = {r[0] ^ 0x80008000u, r[1] ^ 0x80008000u, r[2] ^ 0x80008000u,
                               r[3] ^ 0x80008000u};
    pin(s);
    wgmma_fence();
    wgmma_n128_trans(s, d, wgmma_descriptor(block + Block::kQd, 1024, Block::kPairPanel));
    wgmma_n128_trans(s, minus, wgmma_descriptor(block + Block::kKd, 1024, Block::kPairPanel));
    wgmma_commit();
    store_beta_part(x, u, a.db_part + (chunk * a.in.H + head) * kWidth + mine, lane);
    write_rows(r, out, a.dv, walk, lane);
    if (warp == 0) fetch_block<true>(a.blocks, a.in.H, span, shared, head, c + kStages - 1, lane);
    const bool more = c + kStages - 1 < uint32_t(span.chunks);
    const uint32_t later = (c + kStages - 1) % kStages * kSlice;
    send_slice(a.u, a.in.H, walk, -1, kStages - 1, more, true, u_slices + later);
    fetch_slice(a.d_o, a.in.H, walk, -1, kStages - 1, more, true, slices + later);
    walk.advance(a.in.H, -1);
    wgmma_wait<0>();
    pin(s);
    release_block(shared, st, lane);
  }
  if (a.d_initial_state) store_state(s, a.d_initial_state + state_at, kWidth, lane);
}

template <int kGroups>
cudaError_t launch(const KdaBwdArgs& a, cudaStream_t stream) {
  using Shared = BwdShared<kGroups>;
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
