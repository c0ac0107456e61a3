// The serial part of the KDA chunk form. Columns of the state are independent, so a warpgroup owns 64 value
// columns and keeps their transposed state S^T [64 V x 128 K] in registers in fp32 for the whole segment (a
// warp: 16 of them). Every product is arranged so that one step's accumulator is the next step's operand;
// nothing crosses warpgroups and no barrier is needed:
//   [X^T | O^T] = S^T [Kd^T | Qd^T]   wgmma, 8 of m64n32k16      S^T = S^T diag(decay)     meanwhile
//   U^T = (diag(beta) (V - X))^T R^T  mma.sync, the diagonal of R in fp32
//   S^T += U^T Kr                     wgmma, m64n128k16           O^T += U^T M^T, stored    meanwhile
// Warp 0 keeps the next operand blocks coming with bulk copies, each warp its own slice of V with cp.async (a
// producer warp would cost registers: they are given out to four warps at a time). Modes:
//   kOutput  writes O, final and checkpoint states                              (prefill and training
//   forward) kRecord  writes bf16 S^T at every chunk's entry and U                       (recompute for the
//   backward) kMap     starts from zero for B and, on 128 more columns with V = 0, from the identity for A
//   (segment S -> A S + B)
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"
#include "godwit/kernels/cuda/sm90/kda_segment.cuh"
#include "godwit/kernels/cuda/sm90/kda_state_common.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

enum class Mode { kOutput, kRecord, kMap };

constexpr uint32_t kForgetCheck = 32;  // chunks between looks at whether A has become zero

// The state that enters the segment.
template <Mode kMode>
__device__ __forceinline__ void enter(float (&s)[16][4], const KdaStateArgs& a, const Segment& seg,
                                      int64_t unit, int head, int column, int lane) {
  const int g = lane >> 2, t2 = (lane & 3) * 2;
  if (kMode != Mode::kMap && (seg.index > 0 || a.in.initial_state)) {
    const float* from = seg.index > 0
                            ? a.segment_states + (unit * a.in.H + head) * kWidth * kWidth
                            : a.in.initial_state + (int64_t(seg.n) * a.in.H + head) * kWidth * kWidth;
    load_state(s, from + column, kWidth, lane);
    return;
  }
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool one = kMode == Mode::kMap && 8 * j + t2 + (i & 1) + kWidth == column + g + 8 * (i >> 1);
      s[j][i] = one ? 1.f : 0.f;
    }
}

// (diag(beta) (V - X))^T.
__device__ __forceinline__ void residual(float (&u)[2][4], const float (&x0)[4], const float (&x1)[4],
                                         const uint32_t (&v)[4], const LaneBeta& beta) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* x = i < 2 ? x0 : x1;
    float* to = u[i >> 1] + 2 * (i & 1);
    to[0] = beta.at(i >> 1, 0) * (low_bf16(v[i]) - x[2 * (i & 1)]);
    to[1] = beta.at(i >> 1, 1) * (high_bf16(v[i]) - x[2 * (i & 1) + 1]);
  }
}

// Whether all of a CTA's part of the state is exactly zero.
__device__ __forceinline__ bool vanished(const float (&s)[16][4]) {
  bool any = false;
#pragma unroll
  for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) any |= s[j][i] != 0.f;
  return uniform(__syncthreads_or(any)) == 0;
}

// [X^T | O^T] or X^T of a chunk into x: S^T times its operands. Left in flight, except that with kHalves only
// half of S^T is packed at a time, which saves 16 registers for one more wait.
template <bool kHalves, int kTiles>
__device__ __forceinline__ void first_product(float (&x)[kTiles][4], uint32_t (&f)[kHalves ? 4 : 8][4],
                                              const float (&s)[16][4], uint32_t block) {
  constexpr int kSteps = kHalves ? 4 : 8;
#pragma unroll
  for (int first = 0; first < 8; first += kSteps) {
    if constexpr (kHalves) {
      if (first > 0) {
        wgmma_wait<0>();
        pin(x);
      }
      pack_steps(f, s, first);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int k = first + i;
      wgmma_rows(x, f[i], wgmma_descriptor(block + (k >> 2) * Block::kPairPanel + (k & 3) * 32, 1024, 0),
                 k > 0);
    }
    wgmma_commit();
  }
}

// kPerSm = 2 is for the maps of many segments: 128 registers, so that four warpgroups hide each other's
// latency.
template <int kGroups, int kPerSm, Mode kMode>
__global__ void __launch_bounds__(kGroups * 128, kPerSm)
    state_kernel(const __grid_constant__ KdaStateArgs a) {
  using Shared = StateShared<kGroups, kMode == Mode::kRecord>;
  constexpr bool kHalves = kPerSm == 2;
  extern __shared__ __align__(1024) uint8_t dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  // CTAs that need the same operand blocks are neighbours, so that they run together and the second read of a
  // block comes from L2.
  constexpr int kSplits = (kMode == Mode::kMap ? 2 : 1) * kWidth / Shared::kColumns;
  const int head = blockIdx.x / kSplits, warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
  const int column = blockIdx.x % kSplits * Shared::kColumns;  // of the CTA; 128 and more belong to A
  Segment seg;
  if (!find_segment(a.in, blockIdx.y, a.segments, seg) || (kMode == Mode::kMap && (seg.last || seg.whole)))
    return;
  init_stages(shared);
  const int mine = column + warp * 16;
  const bool values = column < kWidth;
  const Span span{seg.token, seg.end, seg.first_chunk, uniform(int(seg.chunks)), 1};
  RowWalk walk(a.in.H, span, head, lane >> 1, mine + (lane & 1) * 8);
  const uint32_t slices = smem_address(shared.v[0][warp]) + narrow_offset(lane >> 1, lane & 1),
                 out = smem_address(shared.out[warp]);
  constexpr uint32_t kSlice = Shared::kWarps * 512;  // bytes from stage to stage
  for (uint32_t c = 0; c < kStages - 1; ++c) {
    if (warp == 0) fetch_block<kMode == Mode::kOutput>(a.blocks, a.in.H, span, shared, head, c, lane);
    fetch_slice(a.in.v, a.in.H, walk, 1, c, c < uint32_t(span.chunks), values, slices + c * kSlice);
  }
  float s[16][4];
  enter<kMode>(s, a, seg, blockIdx.y, head, mine, lane);
  // Place of the lane in a transposed slice, and in R and M.
  const int narrow_at = narrow_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  const uint32_t v_at = smem_address(shared.v[0][warp]) + narrow_at;
  for (uint32_t c = 0; c < uint32_t(span.chunks); ++c) {
    const uint32_t st = c % kStages;
    const uint32_t block = smem_address(shared.block[st]);
    uint32_t f[kHalves ? 4 : 8][4], v[4], b[4], r[4];
    float x[kMode == Mode::kOutput ? 4 : 2][4];  // tiles 0, 1: X^T; 2, 3: O^T
    const int wanted =
        kMode == Mode::kOutput && a.checkpoint_slot ? a.checkpoint_slot[seg.first_chunk + c] : -1;
    // The wait tells the compiler, which forgets over the loop's edge, that s may be used below while the
    // next wgmma runs.
    wgmma_wait<0>();
    pin(s);
    if constexpr (!kHalves) pack_steps(f, s, 0);
    mbarrier_wait(&shared.full[st], (c / kStages) & 1);
    first_product<kHalves>(x, f, s, block);
    if constexpr (kMode == Mode::kRecord)
      record_state(f, shared.record + warp * 4096,
                   a.chunk_states + ((seg.first_chunk + c) * a.in.H + head) * (kWidth * kWidth * 2) +
                       mine * kWidth * 2,
                   lane);
    wait_slice();
    ldmatrix_x4_trans(v, v_at + st * kSlice);
    ldmatrix_x4(b, block + Block::kR + narrow_at);
    scale_state(s, shared.block[st] + Block::kDecay + (lane & 3) * Block::kDecayRow);
    wgmma_wait<0>();
    pin(x);
    float u[2][4];
    residual(u, x[0], x[1], v, LaneBeta(shared.block[st], lane));
    pack_rows(r, u[0], u[1]);
    mma_bf16(u[0], r, b[0], b[1]);
    mma_bf16(u[1], r, b[2], b[3]);
    pack_rows(r, u[0], u[1]);
    if constexpr (kMode == Mode::kOutput) {  // before the update, which would keep the tensor cores from it
      ldmatrix_x4(b, block + Block::kM + narrow_at);
      mma_bf16(x[2], r, b[0], b[1]);
      mma_bf16(x[3], r, b[2], b[3]);
    }
    pin(s);
    wgmma_fence();
    wgmma_n128_trans(s, r, wgmma_descriptor(block + Block::kKr, 1024, Block::kPanel));
    wgmma_commit();
    if constexpr (kMode == Mode::kOutput) {
      uint32_t rows[4];
      pack_rows(rows, x[2], x[3]);
      write_rows(rows, out, a.o, walk, lane);
    } else if constexpr (kMode == Mode::kRecord) {
      write_rows(r, out, a.u, walk, lane);
    }
    if (warp == 0)
      fetch_block<kMode == Mode::kOutput>(a.blocks, a.in.H, span, shared, head, c + kStages - 1, lane);
    fetch_slice(a.in.v, a.in.H, walk, 1, kStages - 1, c + kStages - 1 < uint32_t(span.chunks), values,
                slices + (c + kStages - 1) % kStages * kSlice);
    walk.advance(a.in.H, 1);
    const int checkpoint = uniform(wanted);
    wgmma_wait<0>();
    pin(s);
    release_block(shared, st, lane);
    if (checkpoint >= 0)
      store_state(s, a.checkpoints + (int64_t(checkpoint) * a.in.H + head) * kWidth * kWidth + mine, kWidth,
                  lane);
    if constexpr (kMode == Mode::kMap) {
      // Once A is exactly zero it stays so: the segment has forgotten what entered.
      if (!values && c % kForgetCheck == kForgetCheck - 1 && vanished(s)) {
        for (uint32_t late = c + 1; late < c + kStages && late < uint32_t(span.chunks); ++late)
          mbarrier_wait(&shared.full[late % kStages], (late / kStages) & 1);
        asm volatile("cp.async.wait_all;" ::: "memory");
        break;
      }
    }
  }
  if constexpr (kMode == Mode::kMap) {
    store_state(s, a.segment_maps + (int64_t(blockIdx.y) * a.in.H + head) * kWidth * 256 + mine, 256, lane);
  } else if (seg.last && a.final_state) {
    store_state(s, a.final_state + (int64_t(seg.n) * a.in.H + head) * kWidth * kWidth + mine, kWidth, lane);
  }
}

template <int kGroups, int kPerSm, Mode kMode>
cudaError_t launch(const KdaStateArgs& a, int columns, cudaStream_t stream) {
  const auto kernel = state_kernel<kGroups, kPerSm, kMode>;
  using Shared = StateShared<kGroups, kMode == Mode::kRecord>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (e != cudaSuccess) return e;
  const dim3 grid(a.in.H * (columns / Shared::kColumns), unsigned(a.segments));
  kernel<<<grid, kGroups * 128, sizeof(Shared), stream>>>(a);
  return cudaGetLastError();
}

// Few (segment, head) pairs: two CTAs of one warpgroup a pair use more multiprocessors. Many: one CTA of two
// warpgroups reads the blocks once. The bits are the same.
template <Mode kMode>
cudaError_t launch_by_pairs(const KdaStateArgs& a, cudaStream_t stream) {
  return a.segments * a.in.H <= 66 ? launch<1, 3, kMode>(a, kWidth, stream)
                                   : launch<2, 1, kMode>(a, kWidth, stream);
}

}  // namespace

cudaError_t launch_state_output(const KdaStateArgs& a, cudaStream_t stream) {
  return launch_by_pairs<Mode::kOutput>(a, stream);
}
cudaError_t launch_state_record(const KdaStateArgs& a, cudaStream_t stream) {
  return launch_by_pairs<Mode::kRecord>(a, stream);
}
cudaError_t launch_segment_maps(const KdaStateArgs& a, cudaStream_t stream) {
  return a.segments * a.in.H <= 132 ? launch<1, 3, Mode::kMap>(a, 2 * kWidth, stream)
                                    : launch<2, 2, Mode::kMap>(a, 2 * kWidth, stream);
}

}  // namespace godwit::kernels::cuda::sm90
