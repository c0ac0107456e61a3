// Chunk-parallel part of the KDA backward: one CTA of 8 warps per chunk and head. From the recorded states S
// (entering) and dS' (of the state leaving), U, dX = dV and dO it makes the gradients of q, k, gate logits
// and beta, and this chunk's share of dt_bias and A_log:
//   dM = stril(dO U^T)   P = -stril(dX U^T)                                  (P = diag(beta) dL)
//   dq = (dO S^T) e^G + (dM Ki) e^G      dk+ = -(dX S^T) e^G + (P Ki) e^G     dk- = (P^T Kd + dM^T Qd) e^-G +
//   (U dS'^T) e^(G_last - G) dG = q dq + k (dk+ - dk-), on the last row also sum_t k (U dS'^T) e^(G_last - G)
//   + e^(G_last) rowsum(S dS');  dg = reverse cumsum of dG
// What the last row adds for k (U dS'^T) e^(G_last - G) and rows t and later subtract again is written as the
// sum over the rows before t.
//   db = (1 - beta) diag(dX U^T) / beta, from the sums that the state pass made in fp32
// A pair of tokens i > j adds w = dM_ij q_i k_j e^(G_i - G_j) (and the like with P) to dG_i and takes it from
// dG_j; of tokens up to j it must cancel. So both products, each of which has one operand rounded to bf16,
// are multiplied by the other operand in the same rounding: what cancels is then the same number. dM, whose
// rounding would otherwise be most of dz's error where keys are alike, is the sum of two bf16. The
// diagonal of dM gives dq_i += dM_ii k_i and dk_i += dM_ii q_i; in dG it cancels, so it is left out there
// rather than subtracted. Ki, Kd and Qd are taken relative to G_last / 2 here, which keeps their products
// away from underflow; the forward must not do so, because a token's bits would then depend on later gates.
// Warp w owns channels 16 w ... 16 w + 15. Values are held like m16n8 accumulators: x[j][2 r + e] is token g
// + 8 r, channel 16 w + 8 j + 2 t + e.
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"
#include "godwit/kernels/cuda/sm90/kda_state_common.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 4096;  // bytes of a [16][128] bf16 tile

struct GradShared {
  alignas(128) uint8_t S[32768], D[32768];  // S^T and dS'^T, bf16 [V][K]
  alignas(128) uint8_t dO[kTile], U[kTile], X[kTile], Kd[kTile], Qd[kTile], Ki[kTile];
  alignas(128) uint8_t P[512], dM[2][512];  // strictly lower; dM is the sum of two bf16
  float diagonal[kChunk];                   // of dM
  alignas(16) float sum[2][kChunk][8];      // per token: k then q sums of the eight warps
  float A[8];
  alignas(8) uint64_t full;
};

using Values = float[2][4];

// What a thread keeps about its 8 elements.
struct Element {
  Values q, k, G, slope,
      logit;  // q, k normalised; G cumulative log2-decay; slope = dg/dz, logit = z + dt (unbounded: g)
  float half[2][2], last[2][2];    // G_last / 2 and G_last of the thread's four channels [j][e]
  float factor_q[2], factor_k[2];  // of its two tokens
};

__device__ __forceinline__ void load_tile(uint8_t* tile, const void* rows, int64_t token, int heads, int head,
                                          int valid, int thread) {
  const int row = thread >> 4, unit = thread & 15;
  const bool there = row < valid;
  cp_async_16(smem_address(tile + wide_offset(row, unit, Block::kPanel)),
              static_cast<const __nv_bfloat16*>(rows) +
                  ((token + (there ? row : 0)) * heads + head) * kWidth + unit * 8,
              there ? 16 : 0);
}

// Sums over the channels of each token, of two quantities: a for k, b for q. Complete after the next barrier
// (token_sum).
__device__ __forceinline__ void add_token_sums(GradShared& shared, const float (&a)[2], const float (&b)[2],
                                               int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float x = a[r], y = b[r];
    x += __shfl_xor_sync(0xffffffffu, x, 1), y += __shfl_xor_sync(0xffffffffu, y, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 2), y += __shfl_xor_sync(0xffffffffu, y, 2);
    if ((lane & 3) == 0)
      shared.sum[0][(lane >> 2) + 8 * r][warp] = x, shared.sum[1][(lane >> 2) + 8 * r][warp] = y;
  }
}
__device__ __forceinline__ float token_sum(const GradShared& shared, int which, int token) {
  const float4 a = reinterpret_cast<const float4*>(shared.sum[which][token])[0],
               b = reinterpret_cast<const float4*>(shared.sum[which][token])[1];
  return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// Inclusive sums over the 16 tokens, towards later tokens; x[0] is token g, x[1] token g + 8. `total` is the
// sum of all.
__device__ __forceinline__ void scan_forward(float& x0, float& x1, float& total, int lane) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) {
    const float y0 = __shfl_up_sync(0xffffffffu, x0, d), y1 = __shfl_up_sync(0xffffffffu, x1, d);
    if (lane >= d) x0 += y0, x1 += y1;
  }
  x1 += __shfl_sync(0xffffffffu, x0, 28 + (lane & 3));
  total = __shfl_sync(0xffffffffu, x1, 28 + (lane & 3));
}
// Exclusive sums.
__device__ __forceinline__ void scan_before(float& x0, float& x1, int lane) {
  float total;
  scan_forward(x0, x1, total, lane);
  const float end0 = __shfl_sync(0xffffffffu, x0, 28 + (lane & 3));
  x0 = __shfl_up_sync(0xffffffffu, x0, 4), x1 = __shfl_up_sync(0xffffffffu, x1, 4);
  if (lane < 4) x0 = 0.f, x1 = end0;
}
__device__ __forceinline__ void scan_backward(float& x0, float& x1, int lane) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) {
    const float y0 = __shfl_down_sync(0xffffffffu, x0, d), y1 = __shfl_down_sync(0xffffffffu, x1, d);
    if (lane + d < 32) x0 += y0, x1 += y1;
  }
  x0 += __shfl_sync(0xffffffffu, x1, lane & 3);
}

template <bool kBounded>
__device__ __forceinline__ void gate(Element& e, int j, int i, float x, float bound, float rate, bool valid) {
  const float s = rcp_approx(1.f + exp2_approx(-x * (kBounded ? rate : 1.f) * kLog2e));  // sigmoid
  e.G[j][i] = valid ? gate_log2<kBounded>(x, bound, rate) : 0.f;
  e.slope[j][i] = !valid ? 0.f : kBounded ? bound * s * (1.f - s) * rate : -rate * s;
  e.logit[j][i] = kBounded ? x : e.G[j][i] * (1.f / kLog2e);
}

// Loads, normalises and gates the thread's elements. Two barriers inside.
template <bool kBounded>
__device__ __forceinline__ void load_elements(Element& e, const KdaInputs& in, GradShared& shared,
                                              int64_t token, int valid, int head, int warp, int lane) {
  const int g = lane >> 2, t2 = (lane & 3) * 2;
  const float rate = expf(in.A_log[head]);
  float kk[2] = {}, qq[2] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int c = warp * 16 + j * 8 + t2;
    const float2 dt = *reinterpret_cast<const float2*>(in.dt_bias + head * kWidth + c);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = g + 8 * r;
      const bool there = row < valid;
      const int64_t at = ((token + row) * in.H + head) * kWidth + c;
      const auto word = [&](const void* p) {
        return there ? *reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(p) + at) : 0u;
      };
      const uint32_t q = word(in.q), k = word(in.k), z = word(in.z);
      e.q[j][2 * r] = low_bf16(q), e.q[j][2 * r + 1] = high_bf16(q);
      e.k[j][2 * r] = low_bf16(k), e.k[j][2 * r + 1] = high_bf16(k);
      gate<kBounded>(e, j, 2 * r, low_bf16(z) + dt.x, in.gate_bound, rate, there);
      gate<kBounded>(e, j, 2 * r + 1, high_bf16(z) + dt.y, in.gate_bound, rate, there);
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) kk[r] += e.k[j][i] * e.k[j][i], qq[r] += e.q[j][i] * e.q[j][i];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scan_forward(e.G[j][i], e.G[j][2 + i], e.last[j][i], lane);
      e.half[j][i] = 0.5f * e.last[j][i];
    }
  }
  add_token_sums(shared, kk, qq, warp, lane);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    e.factor_k[r] = rsqrtf(token_sum(shared, 0, g + 8 * r) + kNormEps);
    e.factor_q[r] = rsqrtf(token_sum(shared, 1, g + 8 * r) + kNormEps) * kQueryScale;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) e.k[j][i] *= e.factor_k[i >> 1], e.q[j][i] *= e.factor_q[i >> 1];
}

__device__ __forceinline__ void write_centred(const Element& e, GradShared& shared, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float u0 = exp2_approx(e.G[j][2 * r] - e.half[j][0]),
                  u1 = exp2_approx(e.G[j][2 * r + 1] - e.half[j][1]);
      const int at = wide_offset((lane >> 2) + 8 * r, 2 * warp + j, Block::kPanel) + (lane & 3) * 4;
      *reinterpret_cast<uint32_t*>(shared.Kd + at) = pack_bf16(e.k[j][2 * r] * u0, e.k[j][2 * r + 1] * u1);
      *reinterpret_cast<uint32_t*>(shared.Qd + at) = pack_bf16(e.q[j][2 * r] * u0, e.q[j][2 * r + 1] * u1);
      *reinterpret_cast<uint32_t*>(shared.Ki + at) =
          pack_bf16(e.k[j][2 * r] * exp2_approx(e.half[j][0] - e.G[j][2 * r]),
                    e.k[j][2 * r + 1] * exp2_approx(e.half[j][1] - e.G[j][2 * r + 1]));
    }
}

// Warp 0: P and db. Warp 1: dM.
__device__ __forceinline__ void score_gradients(const KdaBwdArgs& a, GradShared& shared, int64_t token,
                                                int valid, int64_t unit, int head, int warp, int lane) {
  const int g = lane >> 2, t2 = (lane & 3) * 2;
  if (warp == 0 && lane < valid) {
    const float beta = beta_of(a.in, token + lane, head);
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += a.db_part[unit * kWidth + w * kChunk + lane];
    a.db[(token + lane) * a.in.H + head] = (1.f - beta) * sum / fmaxf(beta, 1e-30f);
  }
  Values c;
  row_products(c, smem_address(warp == 0 ? shared.X : shared.dO), Block::kPanel, smem_address(shared.U),
               lane);
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = g + 8 * r, column = 8 * j + t2;
      float x0 = c[j][2 * r], x1 = c[j][2 * r + 1];
      if (warp == 0) {
        x0 = column < row ? -x0 : 0.f, x1 = column + 1 < row ? -x1 : 0.f;
      } else {
        if (row == column || row == column + 1) shared.diagonal[row] = row == column ? x0 : x1;
        x0 = column < row ? x0 : 0.f, x1 = column + 1 < row ? x1 : 0.f;
      }
      const uint32_t high = pack_bf16(x0, x1);
      const int at = narrow_offset(row, j) + t2 * 2;
      *reinterpret_cast<uint32_t*>((warp == 0 ? shared.P : shared.dM[0]) + at) = high;
      if (warp == 1)
        *reinterpret_cast<uint32_t*>(shared.dM[1] + at) =
            pack_bf16(x0 - low_bf16(high), x1 - high_bf16(high));
    }
}

// dqs = dO S^T, dks = dX S^T, dkr = U dS'^T, and the row sums of S dS' for the lane's eight channels (unit
// lane & 1 of the warp's two).
__device__ __forceinline__ void state_products(Values& dqs, Values& dks, Values& dkr, float (&rows)[8],
                                               const GradShared& shared, int warp, int lane) {
  const int row = (lane & 7) + ((lane >> 3) & 1) * 8;
#pragma unroll
  for (int v = 0; v < 8; ++v) {
    uint32_t f[4], b[4];
    const int a_at = wide_offset(lane & 15, 2 * v + (lane >> 4), Block::kPanel),
              b_at = record_offset(16 * v + row, 2 * warp + (lane >> 4));
    ldmatrix_x4_trans(b, smem_address(shared.S) + b_at);
    ldmatrix_x4(f, smem_address(shared.dO) + a_at);
    mma_bf16(dqs[0], f, b[0], b[1]);
    mma_bf16(dqs[1], f, b[2], b[3]);
    ldmatrix_x4(f, smem_address(shared.X) + a_at);
    mma_bf16(dks[0], f, b[0], b[1]);
    mma_bf16(dks[1], f, b[2], b[3]);
    ldmatrix_x4_trans(b, smem_address(shared.D) + b_at);
    ldmatrix_x4(f, smem_address(shared.U) + a_at);
    mma_bf16(dkr[0], f, b[0], b[1]);
    mma_bf16(dkr[1], f, b[2], b[3]);
    const int at = record_offset(16 * v + (lane >> 1), 2 * warp + (lane & 1));
    const uint4 s = *reinterpret_cast<const uint4*>(shared.S + at),
                d = *reinterpret_cast<const uint4*>(shared.D + at);
    const uint32_t x[4] = {s.x, s.y, s.z, s.w}, y[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
      rows[2 * i] += low_bf16(x[i]) * low_bf16(y[i]), rows[2 * i + 1] += high_bf16(x[i]) * high_bf16(y[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int m = 2; m < 32; m *= 2) rows[i] += __shfl_xor_sync(0xffffffffu, rows[i], m);
}

// The in-chunk parts by tensor cores: dqm = dM Ki, dkp = P Ki, dki = P^T Kd + dM^T Qd, relative to G_last
// / 2.
__device__ __forceinline__ void score_products(Values& dqm, Values& dkp, Values& dki,
                                               const GradShared& shared, int warp, int lane) {
  uint32_t f[4], b[4];
  const int rows_at = narrow_offset(lane & 15, lane >> 4),
            columns_at = narrow_offset(((lane >> 4) << 3) + (lane & 7), (lane >> 3) & 1);
  const int b_at = wide_offset((lane & 7) + ((lane >> 3) & 1) * 8, 2 * warp + (lane >> 4), Block::kPanel);
  ldmatrix_x4_trans(b, smem_address(shared.Ki) + b_at);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    ldmatrix_x4(f, smem_address(shared.dM[part]) + rows_at);
    mma_bf16(dqm[0], f, b[0], b[1]);
    mma_bf16(dqm[1], f, b[2], b[3]);
  }
  ldmatrix_x4(f, smem_address(shared.P) + rows_at);
  mma_bf16(dkp[0], f, b[0], b[1]);
  mma_bf16(dkp[1], f, b[2], b[3]);
  ldmatrix_x4_trans(f, smem_address(shared.P) + columns_at);
  ldmatrix_x4_trans(b, smem_address(shared.Kd) + b_at);
  mma_bf16(dki[0], f, b[0], b[1]);
  mma_bf16(dki[1], f, b[2], b[3]);
  ldmatrix_x4_trans(b, smem_address(shared.Qd) + b_at);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    ldmatrix_x4_trans(f, smem_address(shared.dM[part]) + columns_at);
    mma_bf16(dki[0], f, b[0], b[1]);
    mma_bf16(dki[1], f, b[2], b[3]);
  }
}

// The same where the chunk decays by more than bf16 holds, which an unbounded gate may: exponents subtracted
// pair by pair and already multiplied in. S and D are
// free by now. Three barriers inside.
__device__ __forceinline__ void score_pairs(Values& dqm, Values& dkp, Values& dki, const Element& e,
                                            GradShared& shared, int warp, int lane) {
  auto* in = reinterpret_cast<float(*)[kChunk][kWidth]>(shared.S);   // k, q, G
  auto* out = reinterpret_cast<float(*)[kChunk][kWidth]>(shared.D);  // dqm, dkp, dki
  const auto each = [&](auto f) {
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        f(j, i, (lane >> 2) + 8 * (i >> 1), warp * 16 + 8 * j + (lane & 3) * 2 + (i & 1));
  };
  __syncthreads();
  each([&](int j, int i, int token, int c) {
    in[0][token][c] = e.k[j][i], in[1][token][c] = e.q[j][i], in[2][token][c] = e.G[j][i];
  });
  __syncthreads();
  const auto score = [&](const uint8_t* m, int i, int j) {
    return __bfloat162float(
        *reinterpret_cast<const __nv_bfloat16*>(m + narrow_offset(i, j >> 3) + (j & 7) * 2));
  };
  const auto dM = [&](int i, int j) { return score(shared.dM[0], i, j) + score(shared.dM[1], i, j); };
  const int c = threadIdx.x & 127, first = threadIdx.x >> 7;
  for (int i = first; i < kChunk; i += 2) {
    float x = 0.f, y = 0.f, z = 0.f;
    for (int j = 0; j < i; ++j) {
      const float kj = in[0][j][c] * exp2_approx(in[2][i][c] - in[2][j][c]);
      x += dM(i, j) * kj, y += score(shared.P, i, j) * kj;
    }
    for (int j = i + 1; j < kChunk; ++j)
      z += (score(shared.P, j, i) * in[0][j][c] + dM(j, i) * in[1][j][c]) *
           exp2_approx(in[2][j][c] - in[2][i][c]);
    out[0][i][c] = x, out[1][i][c] = y, out[2][i][c] = z;
  }
  __syncthreads();
  each([&](int j, int i, int token, int ch) {
    dqm[j][i] = out[0][token][ch], dkp[j][i] = out[1][token][ch], dki[j][i] = out[2][token][ch];
  });
}

__device__ __forceinline__ float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16(x));
}

// dq, dk of the normalised vectors from the products (kCentred: those relative to G_last / 2), dG into dg.
template <bool kCentred>
__device__ __forceinline__ void combine(Values& dq, Values& dk, Values& dg, Values& carried, const Element& e,
                                        const float (&diagonal)[2], const Values& dqs, const Values& dks,
                                        const Values& dkr, const Values& dqm, const Values& dkp,
                                        const Values& dki) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float G = e.G[j][i], half = e.half[j][i & 1], gamma = exp2_approx(G);
      const float up = kCentred ? exp2_approx(G - half) : 1.f, down = kCentred ? exp2_approx(half - G) : 1.f;
      const float rest = dkr[j][i] * exp2_approx(e.last[j][i & 1] - G);
      dq[j][i] = dqs[j][i] * gamma + dqm[j][i] * up;
      const float plus = dkp[j][i] * up - dks[j][i] * gamma, minus = dki[j][i] * down;
      dk[j][i] = plus + minus + rest;
      if constexpr (kCentred) {
        const float across = e.q[j][i] * (dqs[j][i] * gamma) - e.k[j][i] * (dks[j][i] * gamma);
        dg[j][i] = across + round_bf16(e.q[j][i] * up) * dqm[j][i] + round_bf16(e.k[j][i] * up) * dkp[j][i] -
                   round_bf16(e.k[j][i] * down) * dki[j][i];
      } else {
        dg[j][i] = e.q[j][i] * dq[j][i] + e.k[j][i] * (plus - minus);
      }
      dq[j][i] += diagonal[i >> 1] * e.k[j][i];
      dk[j][i] += diagonal[i >> 1] * e.q[j][i];
      carried[j][i] = e.k[j][i] * rest;
    }
}

// From dG to dz and the shares of dt_bias and A_log; dg becomes dz. Returns the thread's share of dA_log.
template <bool kBounded>
__device__ __forceinline__ float gate_gradients(Values& dg, Values& carried, const float (&rows)[8],
                                                const Element& e, float* dt_part, int warp, int lane) {
  float dA = 0.f;
  const int t = lane & 3;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float share[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float row = 0.f;  // the row sum of channel 8 j + 2 t + i stands in lanes with lane & 1 == j
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float x = __shfl_sync(0xffffffffu, rows[c], j);
        row = c == 2 * t + i ? x : row;
      }
      scan_backward(dg[j][i], dg[j][2 + i], lane);
      scan_before(carried[j][i], carried[j][2 + i], lane);
      const float last = exp2_approx(e.last[j][i]) * row;
      share[i] = 0.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float g = dg[j][2 * r + i] + (carried[j][2 * r + i] + last), dz = g * e.slope[j][2 * r + i];
        dA += kBounded ? dz * e.logit[j][2 * r + i] : g * (e.logit[j][2 * r + i]);
        dg[j][2 * r + i] = dz;
        share[i] += dz;
      }
    }
#pragma unroll
    for (int m = 4; m < 32; m *= 2)
      share[0] += __shfl_xor_sync(0xffffffffu, share[0], m),
          share[1] += __shfl_xor_sync(0xffffffffu, share[1], m);
    if (lane < 4)
      *reinterpret_cast<float2*>(dt_part + warp * 16 + 8 * j + 2 * t) = make_float2(share[0], share[1]);
  }
#pragma unroll
  for (int m = 1; m < 32; m *= 2) dA += __shfl_xor_sync(0xffffffffu, dA, m);
  return dA;
}

__device__ __forceinline__ void store_values(void* p, const Values& x, int64_t token, int valid, int heads,
                                             int head, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = (lane >> 2) + 8 * r;
      const int64_t at = ((token + row) * heads + head) * kWidth + warp * 16 + 8 * j + (lane & 3) * 2;
      if (row < valid)
        *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(p) + at) =
            pack_bf16(x[j][2 * r], x[j][2 * r + 1]);
    }
}

// A barrier of the CTA. Whether the chunk's operands relative to G_last / 2 can be used, the same in all
// threads.
template <bool kBounded>
__device__ __forceinline__ bool sync_and_choose(const Element& e) {
  if constexpr (kBounded) {
    __syncthreads();
    return true;
  } else {
    const float least = fminf(fminf(e.last[0][0], e.last[0][1]), fminf(e.last[1][0], e.last[1][1]));
    return __syncthreads_and(least >= -kMildDecay);
  }
}

template <bool kBounded>
__global__ void __launch_bounds__(kThreads, 2) gradient_kernel(const __grid_constant__ KdaBwdArgs a) {
  extern __shared__ __align__(128) uint8_t dynamic[];
  GradShared& shared = *reinterpret_cast<GradShared*>(dynamic);
  const KdaInputs& in = a.in;
  const int head = blockIdx.x, thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int64_t slot = blockIdx.y + int64_t(blockIdx.z) * gridDim.y;
  if (slot >= kda_unit_count(in.T, in.N, kChunk)) return;
  const int n = find_sequence(in, slot, kChunk);
  const int64_t begin = sequence_begin(in, n), end = sequence_begin(in, n + 1), unit = slot * in.H + head;
  const int64_t token = begin + (slot - kda_first_unit(begin, n, kChunk)) * kChunk;
  if (token >= end) {  // a number that no chunk has
    if (thread < kWidth) a.dt_part[unit * kWidth + thread] = 0.f;
    if (thread == 0) a.A_part[unit] = 0.f;
    return;
  }
  const int valid = end - token < kChunk ? int(end - token) : kChunk;
  if (thread == 0) {
    mbarrier_init(&shared.full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(&shared.full, 65536);
    bulk_load(shared.S, a.chunk_states + unit * 32768, 32768, &shared.full);
    bulk_load(shared.D, a.chunk_gradients + unit * 32768, 32768, &shared.full);
  }
  load_tile(shared.dO, a.d_o, token, in.H, head, valid, thread);
  load_tile(shared.U, a.u, token, in.H, head, valid, thread);
  load_tile(shared.X, a.dv, token, in.H, head, valid, thread);
  Element e;
  load_elements<kBounded>(e, in, shared, token, valid, head, warp, lane);
  write_centred(e, shared, warp, lane);
  asm volatile("cp.async.wait_all;" ::: "memory");
  const bool centred = sync_and_choose<kBounded>(e);
  if (warp < 2) score_gradients(a, shared, token, valid, unit, head, warp, lane);
  mbarrier_wait(&shared.full, 0);
  Values dqs = {}, dks = {}, dkr = {}, dqm = {}, dkp = {}, dki = {}, dq, dk, dg;
  Values carried;
  float rows[8] = {};
  state_products(dqs, dks, dkr, rows, shared, warp, lane);
  __syncthreads();
  const float diagonal[2] = {shared.diagonal[lane >> 2], shared.diagonal[(lane >> 2) + 8]};
  if (centred) {
    score_products(dqm, dkp, dki, shared, warp, lane);
    combine<true>(dq, dk, dg, carried, e, diagonal, dqs, dks, dkr, dqm, dkp, dki);
  } else {
    score_pairs(dqm, dkp, dki, e, shared, warp, lane);
    combine<false>(dq, dk, dg, carried, e, diagonal, dqs, dks, dkr, dqm, dkp, dki);
  }
  float dot_k[2] = {}, dot_q[2] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) dot_k[i >> 1] += e.k[j][i] * dk[j][i], dot_q[i >> 1] += e.q[j][i] * dq[j][i];
  add_token_sums(shared, dot_k, dot_q, warp, lane);
  const float dA = gate_gradients<kBounded>(dg, carried, rows, e, a.dt_part + unit * kWidth, warp, lane);
  if (lane == 0) shared.A[warp] = dA;
  store_values(a.dz, dg, token, valid, in.H, head, warp, lane);
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float k_dot = token_sum(shared, 0, (lane >> 2) + 8 * r),
                q_dot = token_sum(shared, 1, (lane >> 2) + 8 * r);
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        dk[j][i] = e.factor_k[r] * (dk[j][i] - e.k[j][i] * k_dot);
        dq[j][i] =
            e.factor_q[r] * (dq[j][i] - e.q[j][i] * q_dot * float(kWidth));  // q carries 128^-1/2, twice here
      }
  }
  store_values(a.dq, dq, token, valid, in.H, head, warp, lane);
  store_values(a.dk, dk, token, valid, in.H, head, warp, lane);
  if (thread == 0) {
    float total = 0.f;
    for (int w = 0; w < 8; ++w) total += shared.A[w];
    a.A_part[unit] = total;
  }
}

// Sums the chunks' shares in a fixed order: one CTA a head, thread = 128 channels x 8 interleaved chunk
// ranges.
__global__ void __launch_bounds__(1024) reduce_kernel(KdaBwdArgs a, int64_t slots) {
  __shared__ float part[8][kWidth], A[1024];
  const int head = blockIdx.x, c = threadIdx.x & 127, group = threadIdx.x >> 7;
  float sum = 0.f, dA = 0.f;
  for (int64_t s = group; s < slots; s += 8) sum += a.dt_part[(s * a.in.H + head) * kWidth + c];
  for (int64_t s = threadIdx.x; s < slots; s += 1024) dA += a.A_part[s * a.in.H + head];
  part[group][c] = sum, A[threadIdx.x] = dA;
  for (int half = 512; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) A[threadIdx.x] += A[threadIdx.x + half];
  }
  __syncthreads();
  if (group == 0) {
    for (int g = 1; g < 8; ++g) sum += part[g][c];
    a.d_dt_bias[head * kWidth + c] = sum;
  }
  if (threadIdx.x == 0) a.dA_log[head] = A[0];
}

template <bool kBounded>
cudaError_t launch(const KdaBwdArgs& a, int64_t slots, cudaStream_t stream) {
  const auto kernel = gradient_kernel<kBounded>;
  const cudaError_t e =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(GradShared));
  if (e != cudaSuccess) return e;
  kernel<<<dim3(a.in.H, unsigned(slots < 32768 ? slots : 32768), unsigned((slots + 32767) / 32768)), kThreads,
           sizeof(GradShared), stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_bwd_gradients(const KdaBwdArgs& a, cudaStream_t stream) {
  const int64_t slots = kda_unit_count(a.in.T, a.in.N, kChunk);
  const cudaError_t e =
      a.in.gate_bound < 0.f ? launch<true>(a, slots, stream) : launch<false>(a, slots, stream);
  if (e != cudaSuccess) return e;
  reduce_kernel<<<a.in.H, 1024, 0, stream>>>(a, slots);
  return cudaGetLastError();
}

}  // namespace godwit::kernels::cuda::sm90
