// mla_decode for groups of at most 48 heads. With X a page, 64 rows of R + 64, and heads h:
//   S[r, h] = scale q_h . X_r;  P = exp2(S - m);  O[c, h] = sum_r X[r, c] P[r, h]
// Rows of a page are the 64-row operand of wgmma and heads its columns, N of them: 16, 32 or 48. X serves
// both products from one copy in shared memory, as [rows][k] for scores and as [k][rows] for values.
//
// A block takes a part of a sequence: a producer sends the pages, cut into panels of 64 columns, through a
// ring; two warpgroups of consumers take two pages at a time. Each makes the scores of one page; they share
// the maxima and P; then each adds the values of both pages to its half of the latents, [R / 2, N] in
// registers. A head's column belongs to the same lanes in S and in O, so rescaling moves nothing. The
// reference m moves only when a maximum exceeds it by 2^8. A panel is given back as soon as its product is
// done.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>

#include "godwit/kernels/cuda/sm90/mla_decode.cuh"

namespace godwit::kernels::cuda::sm90 {
namespace {

constexpr int kThreads = 384;
constexpr float kSlack = 8.f;

constexpr int kMostRaw = 12, kRawPanel = 64 * 64;  // of e4m3, before they are widened

struct Barriers {
  uint64_t full[24];
  uint64_t empty[24];
  uint64_t q_full, q_empty;
  uint64_t raw_full[kMostRaw], raw_empty[kMostRaw];
};

// N: heads a block; R: the rank; kFp8: pages of e4m3.
template <int N_, int R, bool kFp8_>
struct Shape {
  static constexpr int N = N_;
  static constexpr bool kFp8 = kFp8_;
  static constexpr int kPanels = R / 64 + 1;
  static constexpr int kBlocks = R / 64 / 2;  // of 64 latents, a warpgroup
  static constexpr int kRank = R;
};

// Shared memory.
template <class S>
struct Layout {
  static constexpr int N = S::N;
  static constexpr int kQ = S::kPanels * N * 128;
  static constexpr int kP = N * 128;
  static constexpr int kFloats = 8 * N + 2 * N;  // maxima by warp, m before and after two pages
  static constexpr int kFixed = kQ + 2 * kP + kFloats * 4 + int(sizeof(Barriers));
  static constexpr int kLeast = 2 * S::kPanels;  // panels: two pages
  static constexpr int kRawStages =
      S::kFp8 ? std::min(kMostRaw, (kSharedLimit - kFixed - kLeast * kMlaPanel) / kRawPanel) : 0;
  static constexpr int kRaw = kRawStages * kRawPanel, kRest = kFixed + kRaw;
  static constexpr int kStages = std::min(24, (kSharedLimit - kRest) / kMlaPanel);
  static_assert(kStages >= kLeast && (!S::kFp8 || kRawStages > 2));
  static constexpr int kBytes = kRest + kStages * kMlaPanel;
};

extern __shared__ __align__(1024) uint8_t shared[];

template <class S>
struct Memory {
  using L = Layout<S>;
  static __device__ uint8_t* panel(int stage) { return shared + stage * kMlaPanel; }
  static __device__ uint8_t* raw(int stage) { return panel(L::kStages) + stage * kRawPanel; }
  static __device__ uint8_t* q() { return panel(L::kStages) + L::kRaw; }
  static __device__ uint8_t* p(int page) { return q() + L::kQ + page * L::kP; }
  static __device__ float* warp_max() { return reinterpret_cast<float*>(p(2)); }  // [8][N]
  static __device__ float* m() { return warp_max() + 8 * S::N; }                  // [2][N]
  static __device__ Barriers& bar() { return *reinterpret_cast<Barriers*>(m() + 2 * S::N); }
};

// A part's q, once the part before is done with its.
template <class S>
__device__ __forceinline__ void load_q(const DecodeArgs& a, const Part& p, int item_at) {
  Barriers& bar = Memory<S>::bar();
  mbarrier_wait(&bar.q_empty, (item_at + 1) & 1);
  mbarrier_arrive_expect(&bar.q_full, Layout<S>::kQ);
  for (int panel = 0; panel < S::kPanels; ++panel)
    for (int h = 0; h < S::N; h += 16)
      tensor_load(Memory<S>::q() + (panel * S::N + h) * 128, &a.q, panel * 64, p.group * S::N + h, p.sequence,
                  &bar.q_full);
}

// The panels of a block's parts, one after the other.
template <class S>
class Panels {
 public:
  __device__ explicit Panels(const DecodeArgs& a) : a_(a), item_(blockIdx.x) { enter(); }
  __device__ bool more() const { return item_ < a_.items(); }
  __device__ int panel() const { return panel_; }
  __device__ int page() const { return here_; }
  __device__ void advance() {
    if (++panel_ < S::kPanels) return;
    panel_ = 0;
    if (++page_ < end_) {
      here_ = next_;
      if (page_ + 1 < end_) next_ = table_[page_ + 1];  // on its way while this page is sent for
    } else {
      item_ += gridDim.x;
      enter();
    }
  }

 private:
  __device__ void enter() {
    for (; item_ < a_.items(); item_ += gridDim.x) {
      const Part p = part_at(a_, item_);
      if (p.begin == p.end) continue;
      page_ = p.begin, end_ = p.end;
      table_ = a_.table + int64_t(p.sequence) * a_.table_stride;
      here_ = table_[page_];
      if (page_ + 1 < end_) next_ = table_[page_ + 1];
      return;
    }
  }
  const DecodeArgs& a_;
  const int32_t* table_ = nullptr;
  int item_, page_ = 0, end_ = 0, panel_ = 0, here_ = 0, next_ = 0;
};

template <class S>
__device__ void produce(const DecodeArgs& a) {
  using M = Memory<S>;
  constexpr int kStages = Layout<S>::kStages;
  Barriers& bar = M::bar();
  Panels<S> from(a);
  int at = 0, item_at = 0;
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x, ++item_at) {
    const Part p = part_at(a, item);
    load_q<S>(a, p, item_at);
    for (int i = (p.end - p.begin) * S::kPanels; i > 0; --i, ++at, from.advance()) {
      const int stage = at % kStages;
      mbarrier_wait(&bar.empty[stage], (at / kStages + 1) & 1);
      mbarrier_arrive_expect(&bar.full[stage], kMlaPanel);
      tensor_load(M::panel(stage), &a.x, from.panel() * 64, 0, from.page(), &bar.full[stage]);
    }
  }
}

// 16 numbers of e4m3 as bf16, which holds them exactly.
__device__ __forceinline__ void widen16(uint4 (&to)[2], uint4 from) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const auto two = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
    const float2 wide = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
    pairs[i] = pack_bf16(wide.x, wide.y);
  }
  to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]}, to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
}

// The same from pages of e4m3, by a warpgroup: panels arrive in a ring of their own and are widened into the
// other.
template <class S>
__device__ void produce_widened(const DecodeArgs& a) {
  using M = Memory<S>;
  constexpr int kStages = Layout<S>::kStages, kRawStages = Layout<S>::kRawStages;
  Barriers& bar = M::bar();
  const int thread = threadIdx.x, lane = thread % 32;
  Panels<S> from(a);
  int sent = 0;
  const auto send = [&] {
    if (thread != 0 || !from.more()) return;
    const int slot = sent % kRawStages;
    mbarrier_wait(&bar.raw_empty[slot], (sent / kRawStages + 1) & 1);
    mbarrier_arrive_expect(&bar.raw_full[slot], kRawPanel);
    tensor_load(M::raw(slot), &a.x, from.panel() * 64, 0, from.page(), &bar.raw_full[slot]);
    ++sent, from.advance();
  };
  for (int i = 1; i < kRawStages; ++i) send();
  int at = 0, item_at = 0;
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x, ++item_at) {
    const Part p = part_at(a, item);
    if (thread == 0) load_q<S>(a, p, item_at);
    for (int i = (p.end - p.begin) * S::kPanels; i > 0; --i, ++at) {
      send();
      const int slot = at % kRawStages, stage = at % kStages;
      mbarrier_wait(&bar.raw_full[slot], at / kRawStages & 1);
      mbarrier_wait(&bar.empty[stage], (at / kStages + 1) & 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int unit = half * 128 + thread, row = unit / 4, column = unit % 4 * 2;  // in 16 bytes
        uint4 wide[2];
        widen16(wide, reinterpret_cast<const uint4*>(M::raw(slot))[unit]);
        uint4* const to = reinterpret_cast<uint4*>(M::panel(stage)) + row * 8;
        to[column ^ (row & 7)] = wide[0], to[(column + 1) ^ (row & 7)] = wide[1];
      }
      fence_async_shared();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&bar.full[stage]), mbarrier_arrive(&bar.raw_empty[slot]);
    }
  }
}

// A consumer thread's state.
template <class S>
struct Worker {
  static constexpr int N = S::N;
  int group, lane, warp, thread;  // thread of the warpgroup
  int turn = 0;                   // which m holds
  float sums[N / 4];              // of P over the thread's rows
  float o[S::kBlocks][N / 2];
};
__device__ __forceinline__ void consumers_sync() {
  named_barrier(1, 256);
}

// P of the thread's page from S, to shared memory, and the accumulators' scale. s: in the exponent's unit,
// -inf where not visible.
template <class S, int N = S::N>
__device__ __forceinline__ void softmax(Worker<S>& w, float (&s)[N / 2]) {
  using M = Memory<S>;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float high[2] = {fmaxf(s[4 * j], s[4 * j + 2]), fmaxf(s[4 * j + 1], s[4 * j + 3])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      for (int lanes = 4; lanes < 32; lanes *= 2)
        high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffffu, high[i], lanes));
    }
    if (w.lane < 4)
      *reinterpret_cast<float2*>(M::warp_max() + (w.group * 4 + w.warp) * N + 8 * j + 2 * w.lane) = {high[0],
                                                                                                     high[1]};
  }
  consumers_sync();
  const float* m = M::m() + w.turn * N;
  float* next = M::m() + (w.turn ^ 1) * N;
  w.turn ^= 1;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const int j = i / 2, c = i % 2, column = 8 * j + 2 * (w.lane % 4) + c;
    float top = -INFINITY;
    for (int k = 0; k < 8; ++k) top = fmaxf(top, M::warp_max()[k * N + column]);
    const float old = m[column], now = top > old + kSlack ? top : old;
    if (w.group == 0 && w.warp == 0 && w.lane < 4) next[column] = now;
    const float lo = exp2_approx(s[4 * j + c] - now), hi = exp2_approx(s[4 * j + 2 + c] - now);
    s[4 * j + c] = lo, s[4 * j + 2 + c] = hi;
    if (__any_sync(0xffffffffu, now != old)) {
      const float scale = now == old ? 1.f : exp2_approx(old - now);
      w.sums[i] *= scale;
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b) w.o[b][4 * j + c] *= scale, w.o[b][4 * j + 2 + c] *= scale;
    }
    w.sums[i] += lo + hi;
  }
  store_p<N>(M::p(w.group), s, w.warp, w.lane);
  fence_async_shared();
  consumers_sync();
}

// Where a panel lies in the ring, `at` panels after the block's first, and which of the barrier's phases is
// its.
template <class S>
struct Place {
  int stage, phase;
  __device__ explicit Place(int at) : stage(at % Layout<S>::kStages), phase(at / Layout<S>::kStages & 1) {}
};

// S of a page; the panel that only scores need is given back.
template <class S, int N = S::N>
__device__ __forceinline__ void scores(const Worker<S>& w, float scale, int at, int low, int high,
                                       float (&s)[N / 2]) {
  using M = Memory<S>;
  Barriers& bar = M::bar();
  clear(s);
#pragma unroll 1
  for (int panel = 0; panel < S::kPanels; ++panel) {
    const Place<S> place(at + panel);
    mbarrier_wait(&bar.full[place.stage], place.phase);
    const uint64_t x = wgmma_descriptor(smem_address(M::panel(place.stage)), 1024, 0);
    const uint64_t q = wgmma_descriptor(smem_address(M::q() + panel * N * 128), 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) Wgmma<N>::template smem<0, 0>(s, x + 2 * kk, q + 2 * kk);
    wgmma_commit();
  }
  wgmma_wait<0>();
  pin(s);
  if (w.lane == 0) mbarrier_arrive(&bar.empty[Place<S>(at + S::kPanels - 1).stage]);
  const int row = w.warp * 16 + w.lane / 4;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const int r = row + i / 2 % 2 * 8;
    s[i] = r >= low && r < high ? s[i] * scale : -INFINITY;
  }
  if (low > 0 || high < 64) {
    for (int b = 0; b < 2 * S::kBlocks; ++b)
      clear_rows(M::panel(Place<S>(at + b).stage), w.thread, low, high);
  }
}

// O += the page's values, this warpgroup's latents.
template <class S, int N = S::N>
__device__ __forceinline__ void add_values(Worker<S>& w, int at, int page) {
  using M = Memory<S>;
  Barriers& bar = M::bar();
  const uint64_t p = wgmma_descriptor(smem_address(M::p(page)), 1024, 0);
  at += w.group * S::kBlocks;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) pin(w.o[b]);
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) {
    const Place<S> place(at + b);
    mbarrier_wait(&bar.full[place.stage], place.phase);
    const uint64_t x = wgmma_descriptor(smem_address(M::panel(place.stage)), 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) Wgmma<N>::template smem<1, 0>(w.o[b], x + 128 * kk, p + 2 * kk);
    wgmma_commit();
  }
  const auto give_back = [&](int b) {
    if (w.lane == 0) mbarrier_arrive(&bar.empty[Place<S>(at + b).stage]);
  };
  static_assert(S::kBlocks == 2 || S::kBlocks == 4);
  if constexpr (S::kBlocks == 4) {
    wgmma_wait<3>(), give_back(0);
    wgmma_wait<2>(), give_back(1);
  }
  wgmma_wait<1>(), give_back(S::kBlocks - 2);
  wgmma_wait<0>(), give_back(S::kBlocks - 1);
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) pin(w.o[b]);
}

template <class S, int N = S::N>
__device__ __forceinline__ void begin_part(Worker<S>& w) {
  using M = Memory<S>;
  for (int i = w.thread; i < N; i += 128) M::m()[w.turn * N + i] = -INFINITY;  // by both warpgroups
#pragma unroll
  for (int i = 0; i < N / 4; ++i) w.sums[i] = 0;
#pragma unroll
  for (int b = 0; b < S::kBlocks; ++b) clear(w.o[b]);
  consumers_sync();
}

template <class S, int N = S::N>
__device__ __forceinline__ void end_part(Worker<S>& w, const DecodeArgs& a, const Part& part) {
  using M = Memory<S>;
  const int64_t at = (int64_t(part.part) * a.sequences + part.sequence) * a.heads + part.group * N;
  const int heads = min(N, a.heads - part.group * N);
  if (part.begin == part.end) {
    for (int head = w.thread; head < heads && w.group == 0; head += 128) a.sums[at + head] = {-INFINITY, 0.f};
    return;
  }
  float* sums = reinterpret_cast<float*>(M::p(0));  // [N / 4][256], which P of both pages leaves room for
  consumers_sync();
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    sums[i * 256 + w.group * 128 + w.thread] = w.sums[i];
    const int head = i / 2 * 8 + 2 * (w.lane % 4) + i % 2;
    if (head < heads) {
      float* o = a.o + (at + head) * S::kRank + w.group * (S::kRank / 2) + w.warp * 16 + w.lane / 4;
#pragma unroll
      for (int b = 0; b < S::kBlocks; ++b)
        o[b * 64] = w.o[b][i / 2 * 4 + i % 2], o[b * 64 + 8] = w.o[b][i / 2 * 4 + 2 + i % 2];
    }
  }
  consumers_sync();
  // A column's sum lies in 64 threads, lanes lane % 4 = t of each warp.
  for (int head = w.thread; head < heads && w.group == 0; head += 128) {
    const float* column = sums + (head / 8 * 2 + head % 2) * 256 + head % 8 / 2;
    float sum = 0;
    for (int i = 0; i < 64; ++i) sum += column[i * 4];
    a.sums[at + head] = {M::m()[w.turn * N + head], sum};
  }
  consumers_sync();
}

template <class S, int N = S::N>
__device__ void consume(const DecodeArgs& a, int group) {
  Barriers& bar = Memory<S>::bar();
  Worker<S> w;
  w.group = group, w.thread = threadIdx.x % 128, w.lane = threadIdx.x % 32, w.warp = uniform(w.thread / 32);
  int at = 0, item_at = 0;
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x, ++item_at) {
    const Part part = part_at(a, item);
    mbarrier_wait(&bar.q_full, item_at & 1);
    begin_part<S>(w);
    for (int first = part.begin; first < part.end; first += 2) {
      const int pages = min(2, part.end - first), row0 = (first + w.group) * 64;
      float s[N / 2];
      if (w.group < pages) {
        scores<S>(w, a.scale, at + w.group * S::kPanels, max(0, part.first_row - row0),
                  min(64, part.rows - row0), s);
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) s[i] = -INFINITY;
      }
      softmax<S>(w, s);
      for (int page = 0; page < pages; ++page, at += S::kPanels) add_values<S>(w, at, page);
    }
    if (w.lane == 0) mbarrier_arrive(&bar.q_empty);
    end_part<S>(w, a, part);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) decode_kernel(const __grid_constant__ DecodeArgs a) {
  using L = Layout<S>;
  Barriers& bar = Memory<S>::bar();
  const int role = uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    prefetch_map(&a.q), prefetch_map(&a.x);
    for (int i = 0; i < L::kStages; ++i)
      mbarrier_init(&bar.full[i], S::kFp8 ? 4 : 1), mbarrier_init(&bar.empty[i], 4);
    for (int i = 0; i < L::kRawStages; ++i)
      mbarrier_init(&bar.raw_full[i], 1), mbarrier_init(&bar.raw_empty[i], 4);
    mbarrier_init(&bar.q_full, 1), mbarrier_init(&bar.q_empty, 8);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (role == 0) {
    if constexpr (S::kFp8) {
      registers_down<56>();
      produce_widened<S>(a);
    } else {
      registers_down<24>();
      if (threadIdx.x == 0) produce<S>(a);
    }
  } else {
    registers_up<S::kFp8 ? 224 : 240>();
    consume<S>(a, role - 1);
    launch_dependents();  // not before: the merge's blocks would wait where there is room, on few
                          // multiprocessors
  }
}

template <class S>
cudaError_t launch_shape(const DecodeArgs& a, int processors, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(decode_kernel<S>, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<S>::kBytes);
  if (error != cudaSuccess) return error;
  decode_kernel<S><<<std::min(processors, a.items()), kThreads, Layout<S>::kBytes, stream>>>(a);
  return cudaGetLastError();
}
template <bool kFp8>
cudaError_t launch_groups(const DecodeArgs& a, int processors, cudaStream_t stream) {
  const int heads = (a.heads + a.groups - 1) / a.groups;
  const auto launch = [&]<int R>() {
    return heads <= 16   ? launch_shape<Shape<16, R, kFp8>>(a, processors, stream)
           : heads <= 32 ? launch_shape<Shape<32, R, kFp8>>(a, processors, stream)
                         : launch_shape<Shape<48, R, kFp8>>(a, processors, stream);
  };
  return a.rank == 512 ? launch.template operator()<512>() : launch.template operator()<256>();
}

}  // namespace
}  // namespace godwit::kernels::cuda::sm90
