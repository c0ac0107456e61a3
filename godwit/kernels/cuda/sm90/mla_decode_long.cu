// One query a sequence over paged latents (mla_decode_long.h). With X a page, 64 rows of 576, and heads h:
//   S[r, h] = scale q_h . X_r;  P = exp2(S - m);  O[c, h] = sum_r X[r, c] P[r, h]
// Rows of a page are the 64-row operand of wgmma and heads its columns, N of them: 16, 32 or 48, with 96
// heads in two groups. X serves both products from one copy in shared memory, as [rows][k] for scores and as
// [k][rows] for values.
//
// A block takes a part of a sequence: a producer thread sends the pages, cut into panels of 64 columns,
// through a ring; two warpgroups of consumers take two pages at a time. Each makes the scores of one page;
// they share the maxima and P; then each adds the values of both pages to its half of the latents, [256, N]
// in registers. A head's column belongs to the same lanes in S and in O, so rescaling moves nothing. The
// reference m moves only when a maximum exceeds it by 2^8. A panel is given back as soon as its product is
// done. merge_kernel joins the parts.
#include "godwit/kernels/mla_decode_long.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "godwit/kernels/cuda/sm90/tma.cuh"
#include "godwit/kernels/cuda/sm90/wgmma.cuh"

namespace godwit::kernels::cuda {
namespace sm90 {
namespace {

constexpr int kThreads = 384;
constexpr int kPanels = kMlaWidth / 64;
constexpr int kBlocks = kMlaRank / 64 / 2;  // of 64 latents, a warpgroup
constexpr int kPanel = 64 * 128;            // bytes
constexpr float kSlack = 8.f;
constexpr int kSharedLimit = 232448;

struct DecodeArgs {
  CUtensorMap q;  // boxes of 64 columns by 16 heads
  CUtensorMap x;  // boxes of 64 columns by 64 rows
  const int32_t* table = nullptr;
  const int64_t* lengths = nullptr;
  int table_stride = 0;
  int sequences = 0, heads = 0, groups = 0, parts = 0, part_pages = 0;
  int64_t window = 0;
  float scale = 0;         // with log2 e
  float* o = nullptr;      // [parts][N][H][512]
  float2* sums = nullptr;  // [parts][N][H]: m and the sum of P
};

// Shared memory for N heads a block.
template <int N>
struct Layout {
  static constexpr int kQ = kPanels * N * 128;
  static constexpr int kP = N * 128;
  static constexpr int kFloats = 8 * N + 2 * N;  // maxima by warp, m before and after two pages
  static constexpr int kRest = kQ + 2 * kP + kFloats * 4 + 1024;
  static constexpr int kStages = std::min(24, (kSharedLimit - kRest) / kPanel);
  static constexpr int kBytes = kRest + kStages * kPanel;
};
struct Barriers {
  uint64_t full[24];
  uint64_t empty[24];
  uint64_t q_full, q_empty;
};

extern __shared__ __align__(1024) uint8_t shared[];
template <int N>
__device__ __forceinline__ Barriers& barriers() {
  using L = Layout<N>;
  return *reinterpret_cast<Barriers*>(shared + L::kStages * kPanel + L::kQ + 2 * L::kP + L::kFloats * 4);
}

// A part: pages [begin, end) of a sequence.
struct Part {
  int sequence, group, part, begin, end;
  int first_row, rows;  // visible rows of the sequence
};
__device__ __forceinline__ Part part_at(const DecodeArgs& a, int item) {
  Part p;
  p.group = item % a.groups, item /= a.groups;
  p.part = item % a.parts, p.sequence = item / a.parts;
  p.rows = int(a.lengths[p.sequence]);
  p.first_row = a.window > 0 ? int(max(int64_t(0), p.rows - a.window)) : 0;
  const int first = p.first_row / 64, pages = (p.rows + 63) / 64 - first;
  p.begin = first + min(pages, p.part * a.part_pages),
  p.end = first + min(pages, (p.part + 1) * a.part_pages);
  return p;
}

template <int N>
__device__ void produce(const DecodeArgs& a, uint8_t* ring, uint8_t* q, Barriers& bar) {
  constexpr int kStages = Layout<N>::kStages;
  const int items = a.sequences * a.parts * a.groups;
  int at = 0, item_at = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, ++item_at) {
    const Part p = part_at(a, item);
    mbarrier_wait(&bar.q_empty, (item_at + 1) & 1);
    mbarrier_arrive_expect(&bar.q_full, Layout<N>::kQ);
    for (int panel = 0; panel < kPanels; ++panel)
      for (int h = 0; h < N; h += 16)
        tensor_load(q + (panel * N + h) * 128, &a.q, panel * 64, p.group * N + h, p.sequence, &bar.q_full);
    const int32_t* const table = a.table + int64_t(p.sequence) * a.table_stride;
    int next = p.begin < p.end ? table[p.begin] : 0;
    for (int page = p.begin; page < p.end; ++page) {
      const int where = next;
      if (page + 1 < p.end) next = table[page + 1];  // on its way while this page is sent for
      for (int panel = 0; panel < kPanels; ++panel, ++at) {
        const int stage = at % kStages;
        mbarrier_wait(&bar.empty[stage], (at / kStages + 1) & 1);
        mbarrier_arrive_expect(&bar.full[stage], kPanel);
        tensor_load(ring + stage * kPanel, &a.x, panel * 64, 0, where, &bar.full[stage]);
      }
    }
  }
}

// A consumer thread's state. Its columns: 8 j + 2 (lane % 4) and the next, j = 0 .. N / 8 - 1.
template <int N>
struct Worker {
  using L = Layout<N>;
  int group, lane, warp, thread;  // thread of the warpgroup
  int turn = 0;                   // which m holds
  float sums[N / 4];              // of P over the thread's rows
  float o[kBlocks][N / 2];
  __device__ uint8_t* panel(int stage) const { return shared + stage * kPanel; }
  __device__ uint8_t* q() const { return shared + L::kStages * kPanel; }
  __device__ uint8_t* p(int page) const { return q() + L::kQ + page * L::kP; }
  __device__ float* warp_max() const { return reinterpret_cast<float*>(p(2)); }  // [8][N]
  __device__ float* m() const { return warp_max() + 8 * N; }                     // [2][N]
};
__device__ __forceinline__ void consumers_sync() {
  named_barrier(1, 256);
}

// The rows of a page outside [low, high) hold anything, NaN too; their values must not meet a zero of P.
__device__ __forceinline__ void clear_rows(uint8_t* panel, int thread, int low, int high) {
  for (int i = thread; i < 64 * 8; i += 128) {
    const int row = i / 8;
    if (row < low || row >= high) reinterpret_cast<uint4*>(panel)[i] = uint4{0, 0, 0, 0};
  }
}

// P of the thread's page from S, to shared memory, and the accumulators' scale. s: in the exponent's unit,
// -inf where not visible.
template <int N>
__device__ __forceinline__ void softmax(Worker<N>& w, float (&s)[N / 2]) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float high[2] = {fmaxf(s[4 * j], s[4 * j + 2]), fmaxf(s[4 * j + 1], s[4 * j + 3])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int lanes = 4; lanes < 32; lanes *= 2)
        high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffffu, high[i], lanes));
    }
    if (w.lane < 4)
      *reinterpret_cast<float2*>(w.warp_max() + (w.group * 4 + w.warp) * N + 8 * j + 2 * w.lane) = {high[0],
                                                                                                    high[1]};
  }
  consumers_sync();
  const float* m = w.m() + w.turn * N;
  float* next = w.m() + (w.turn ^ 1) * N;
  w.turn ^= 1;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const int j = i / 2, c = i % 2, column = 8 * j + 2 * (w.lane % 4) + c;
    float top = -INFINITY;
    for (int k = 0; k < 8; ++k) top = fmaxf(top, w.warp_max()[k * N + column]);
    const float old = m[column], now = top > old + kSlack ? top : old;
    if (w.group == 0 && w.warp == 0 && w.lane < 4) next[column] = now;
    const float lo = exp2_approx(s[4 * j + c] - now), hi = exp2_approx(s[4 * j + 2 + c] - now);
    s[4 * j + c] = lo, s[4 * j + 2 + c] = hi;
    if (__any_sync(0xffffffffu, now != old)) {
      const float scale = now == old ? 1.f : exp2_approx(old - now);
      w.sums[i] *= scale;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) w.o[b][4 * j + c] *= scale, w.o[b][4 * j + 2 + c] *= scale;
    }
    w.sums[i] += lo + hi;
  }
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    const uint32_t r[4] = {pack_bf16(s[4 * j], s[4 * j + 1]), pack_bf16(s[4 * j + 2], s[4 * j + 3]),
                           pack_bf16(s[4 * j + 4], s[4 * j + 5]), pack_bf16(s[4 * j + 6], s[4 * j + 7])};
    const int row = 8 * j + w.lane / 16 * 8 + w.lane % 8, unit = 2 * w.warp + w.lane / 8 % 2;
    stmatrix_x4_trans(smem_address(w.p(w.group)) + row * 128 + ((unit ^ (row & 7)) << 4), r);
  }
  fence_async_shared();
  consumers_sync();
}

// Where a panel lies in the ring, `at` panels after the block's first, and which of the barrier's phases is
// its.
template <int N>
struct Place {
  int stage, phase;
  __device__ explicit Place(int at) : stage(at % Layout<N>::kStages), phase(at / Layout<N>::kStages & 1) {}
};

// S of a page; the panel that only scores need is given back.
template <int N>
__device__ __forceinline__ void scores(const Worker<N>& w, float scale, int at, int low, int high,
                                       float (&s)[N / 2]) {
  Barriers& bar = barriers<N>();
  clear(s);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel) {
    const Place<N> place(at + panel);
    mbarrier_wait(&bar.full[place.stage], place.phase);
    const uint64_t x = wgmma_descriptor(smem_address(w.panel(place.stage)), 1024, 0);
    const uint64_t q = wgmma_descriptor(smem_address(w.q() + panel * N * 128), 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) Wgmma<N>::template smem<0, 0>(s, x + 2 * kk, q + 2 * kk);
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin(s);
  if (w.lane == 0) mbarrier_arrive(&bar.empty[Place<N>(at + kPanels - 1).stage]);
  const int row = w.warp * 16 + w.lane / 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int r = row + i / 2 % 2 * 8;
    s[i] = r >= low && r < high ? s[i] * scale : -INFINITY;
  }
  if (low > 0 || high < 64) {
    for (int b = 0; b < 2 * kBlocks; ++b) clear_rows(w.panel(Place<N>(at + b).stage), w.thread, low, high);
  }
}

// O += the page's values, this warpgroup's latents.
template <int N>
__device__ __forceinline__ void add_values(Worker<N>& w, int at, int page) {
  Barriers& bar = barriers<N>();
  const uint64_t p = wgmma_descriptor(smem_address(w.p(page)), 1024, 0);
  at += w.group * kBlocks;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) pin(w.o[b]);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const Place<N> place(at + b);
    mbarrier_wait(&bar.full[place.stage], place.phase);
    const uint64_t x = wgmma_descriptor(smem_address(w.panel(place.stage)), 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) Wgmma<N>::template smem<1, 0>(w.o[b], x + 128 * kk, p + 2 * kk);
    wgmma_commit();
  }
  const auto give_back = [&](int b) {
    if (w.lane == 0) mbarrier_arrive(&bar.empty[Place<N>(at + b).stage]);
  };
  static_assert(kBlocks == 4);
  wgmma_wait<3>(), give_back(0);
  wgmma_wait<2>(), give_back(1);
  wgmma_wait<1>(), give_back(2);
  wgmma_wait<0>(), give_back(3);
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) pin(w.o[b]);
}

template <int N>
__device__ __forceinline__ void begin_part(Worker<N>& w) {
  for (int i = w.thread; i < N; i += 128) w.m()[w.turn * N + i] = -INFINITY;  // by both warpgroups
#pragma unroll
  for (int i = 0; i < N / 4; ++i) w.sums[i] = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) clear(w.o[b]);
  consumers_sync();
}

template <int N>
__device__ __forceinline__ void end_part(Worker<N>& w, const DecodeArgs& a, const Part& part) {
  const int64_t at = (int64_t(part.part) * a.sequences + part.sequence) * a.heads + part.group * N;
  const int heads = min(N, a.heads - part.group * N);
  float* sums = reinterpret_cast<float*>(w.p(0));  // [N / 4][256], which P of both pages leaves room for
  consumers_sync();
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    sums[i * 256 + w.group * 128 + w.thread] = w.sums[i];
    const int head = i / 2 * 8 + 2 * (w.lane % 4) + i % 2;
    if (head < heads) {
      float* o = a.o + (at + head) * kMlaRank + w.group * (kMlaRank / 2) + w.warp * 16 + w.lane / 4;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        o[b * 64] = w.o[b][i / 2 * 4 + i % 2], o[b * 64 + 8] = w.o[b][i / 2 * 4 + 2 + i % 2];
    }
  }
  consumers_sync();
  // A column's sum lies in 64 threads, lanes lane % 4 = t of each warp.
  for (int head = w.thread; head < heads && w.group == 0; head += 128) {
    const float* column = sums + (head / 8 * 2 + head % 2) * 256 + head % 8 / 2;
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += column[i * 4];
    a.sums[at + head] = {w.m()[w.turn * N + head], sum};
  }
  consumers_sync();
}

template <int N>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeArgs a) {
  using L = Layout<N>;
  Barriers& bar = barriers<N>();
  const int role = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) mbarrier_init(&bar.full[i], 1), mbarrier_init(&bar.empty[i], 4);
    mbarrier_init(&bar.q_full, 1), mbarrier_init(&bar.q_empty, 8);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    registers_down<24>();
    if (threadIdx.x == 0) produce<N>(a, shared, shared + L::kStages * kPanel, bar);
    return;
  }
  registers_up<240>();
  Worker<N> w;
  w.group = role - 1, w.thread = threadIdx.x % 128, w.lane = threadIdx.x % 32,
  w.warp = uniform(w.thread / 32);
  const int items = a.sequences * a.parts * a.groups;
  int at = 0, item_at = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, ++item_at) {
    const Part part = part_at(a, item);
    mbarrier_wait(&bar.q_full, item_at & 1);
    begin_part<N>(w);
    for (int first = part.begin; first < part.end; first += 2) {
      const int pages = min(2, part.end - first), row0 = (first + w.group) * 64;
      float s[N / 2];
      if (w.group < pages) {
        scores<N>(w, a.scale, at + w.group * kPanels, max(0, part.first_row - row0),
                  min(64, part.rows - row0), s);
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) s[i] = -INFINITY;
      }
      softmax<N>(w, s);
      for (int page = 0; page < pages; ++page, at += kPanels) add_values<N>(w, at, page);
    }
    if (w.lane == 0) mbarrier_arrive(&bar.q_empty);
    end_part<N>(w, a, part);
  }
  launch_dependents();  // not before: the merge's blocks would wait where there is room, on few
                        // multiprocessors
}

constexpr int kMergeWarps = 16;

// One block a sequence, a head and 128 latents: o = sum_i 2^(m_i - m) O_i / sum_i 2^(m_i - m) sum_i. The
// warps take parts in turn and are added in order.
__global__ void __launch_bounds__(kMergeWarps * 32) merge_kernel(DecodeArgs a, __nv_bfloat16* out) {
  __shared__ float4 rows[kMergeWarps][32];
  __shared__ float sums[kMergeWarps];
  const int64_t head = blockIdx.x, all = int64_t(a.sequences) * a.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, parts = a.parts;
  wait_for_prerequisites();
  float m = -INFINITY;
  for (int i = lane; i < parts; i += 32) m = fmaxf(m, a.sums[i * all + head].x);
  for (int lanes = 1; lanes < 32; lanes *= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, lanes));
  float4 o = {0, 0, 0, 0};
  float sum = 0;
#pragma unroll 8
  for (int i = warp; i < parts; i += kMergeWarps) {
    const float2 part = a.sums[i * all + head];
    const float scale = part.x == -INFINITY ? 0.f : exp2_approx(part.x - m);
    const float4 x =
        reinterpret_cast<const float4*>(a.o + (i * all + head) * kMlaRank)[blockIdx.y * 32 + lane];
    o.x = fmaf(scale, x.x, o.x), o.y = fmaf(scale, x.y, o.y), o.z = fmaf(scale, x.z, o.z),
    o.w = fmaf(scale, x.w, o.w);
    sum = fmaf(scale, part.y, sum);
  }
  rows[warp][lane] = o;
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  for (int i = 1; i < kMergeWarps; ++i) {
    const float4 x = rows[i][lane];
    o.x += x.x, o.y += x.y, o.z += x.z, o.w += x.w, sum += sums[i];
  }
  const float inverse = 1.f / sum;
  reinterpret_cast<uint2*>(out + head * kMlaRank)[blockIdx.y * 32 + lane] = {
      pack_bf16(o.x * inverse, o.y * inverse), pack_bf16(o.z * inverse, o.w * inverse)};
}

template <int N>
cudaError_t launch_decode(const DecodeArgs& a, int processors, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(decode_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<N>::kBytes);
  if (error != cudaSuccess) return error;
  decode_kernel<N>
      <<<std::min(processors, a.sequences * a.parts * a.groups), kThreads, Layout<N>::kBytes, stream>>>(a);
  return cudaGetLastError();
}

int group_count(int heads) {
  return (heads + 47) / 48;
}

}  // namespace
}  // namespace sm90

// What takes the least time on 132 multiprocessors, counted in pages; a part costs about three pages beside
// its own.
int mla_decode_long_part_pages(int64_t pages, int sequences, int heads) {
  constexpr int64_t kProcessors = 132, kExtra = 3, kMost = 132;
  const int64_t items = int64_t(sequences) * sm90::group_count(heads);
  int64_t best = 1, best_cost = INT64_MAX;
  for (int64_t parts = 1; parts <= std::min(kMost, std::max<int64_t>(1, pages / 2)); ++parts) {
    const int64_t each = (pages + parts - 1) / parts, waves = (items * parts + kProcessors - 1) / kProcessors;
    const int64_t cost = waves * (each + kExtra);
    if (cost < best_cost) best = each, best_cost = cost;
  }
  return int(best);
}

size_t mla_decode_long_workspace_bytes(int sequences, int heads, int parts) {
  return size_t(parts) * sequences * heads * (kMlaRank * sizeof(float) + sizeof(float2));
}

int mla_decode_long(const MlaDecodeLongParams& p) {
  using namespace sm90;
  if (p.sequences == 0) return cudaSuccess;
  DecodeArgs a;
  a.table = p.table, a.table_stride = p.table_stride, a.lengths = p.lengths;
  a.sequences = p.sequences, a.heads = p.heads, a.groups = group_count(p.heads), a.parts = p.parts;
  a.part_pages = p.part_pages;
  a.window = p.window, a.scale = p.scale * 1.4426950408889634f;
  a.o = static_cast<float*>(p.workspace);
  a.sums = reinterpret_cast<float2*>(a.o + size_t(p.parts) * p.sequences * p.heads * kMlaRank);
  const uint64_t width = kMlaWidth, heads = p.heads;
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = make_tensor_map(&a.q, {.base = p.q,
                                   .size = {width, heads, uint64_t(p.sequences)},
                                   .stride = {width, width * heads},
                                   .box = {64, 16, 1}});
  if (error == cudaSuccess)
    error = make_tensor_map(&a.x, {.base = p.pages,
                                   .size = {width, kMlaPageRows, uint64_t(p.page_count)},
                                   .stride = {uint64_t(p.row_stride), uint64_t(p.page_stride)},
                                   .box = {64, kMlaPageRows, 1}});
  const int group = (p.heads + a.groups - 1) / a.groups;
  const cudaStream_t stream = p.stream;
  if (error == cudaSuccess)
    error = group <= 16   ? launch_decode<16>(a, processors, stream)
            : group <= 32 ? launch_decode<32>(a, processors, stream)
                          : launch_decode<48>(a, processors, stream);
  if (error != cudaSuccess) return error;
  return launch_after(merge_kernel, dim3(unsigned(p.sequences * p.heads), kMlaRank / 128), kMergeWarps * 32,
                      stream, a, static_cast<__nv_bfloat16*>(p.o));
}

}  // namespace godwit::kernels::cuda
