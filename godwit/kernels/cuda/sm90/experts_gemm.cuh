// Grouped products of the experts on the tensor cores, one persistent kernel. For every tile of rows of an
// expert e,
//   D[f, r] = sum_k A_e[f, k] X[r, k]
// A_e are weights, X rows sorted by expert (experts_plan.cuh). The weights are the 64-row operand of wgmma
// and the rows its column operand, whose width is chosen tile by tile from 16 to 176: few rows cost few
// columns, and 300 rows cost two tiles of 152, so that one kernel serves decoding, where it streams weights,
// and training.
//
// A block: a producer thread and two warpgroups of consumers. A tile is 256 rows of A by N rows of X; a
// consumer holds two pieces of 64 rows of A, which are gate and up of the same features where the two are
// multiplied. The producer keeps kStages blocks of 64 k in flight. Every element is one chain over k in steps
// of 16, whatever the tile, so a row's bits do not depend on its batch. The second consumer starts late and
// stays late: one's epilogue runs under the other's products.
#pragma once

#include <cuda_bf16.h>

#include "godwit/kernels/cuda/sm90/experts_plan.cuh"
#include "godwit/kernels/cuda/sm90/glu.cuh"
#include "godwit/kernels/cuda/sm90/tma.cuh"
#include "godwit/kernels/cuda/sm90/wgmma.cuh"

namespace godwit::kernels::cuda::sm90 {

enum class Product {
  kGlu,         // A = w1 and w3 [E, F, K]; out[r, f] = glu(w1 x, w3 x)
  kGluKeep,     // and both products to gate_up
  kPlain,       // A = w [E, F, K]; out[r, f] = w x
  kTransposed,  // A = w [E, K, F], or two of them one after the other; out[r, f] = sum_k w[k, f] x[r, k]
};
constexpr bool is_pair(Product p) {
  return p == Product::kGlu || p == Product::kGluKeep;
}

struct ProductArgs {
  CUtensorMap a[2];  // weights: boxes of 64 k by 128 rows, transposed 64 rows by 64 k
  CUtensorMap x32;   // rows: boxes of 64 k by 32 rows
  CUtensorMap x8;    // and by 8
  const RowTile* tiles = nullptr;
  const int* totals = nullptr;
  int a_tiles = 0;  // of 256 rows of A (pairs: 128 of each)
  int k_blocks = 0;
  int first_blocks =
      0;  // transposed: blocks of the first weight; the second's x begin at column second_column
  int second_column = 0;
  int features = 0;
  GluForm form;
  __nv_bfloat16* out = nullptr;      // [rows, features]
  __nv_bfloat16* gate_up = nullptr;  // [rows, 2 features]
};

constexpr int kStages = 4;
constexpr int kBlockK = 64;
constexpr int kTileA = 256;
constexpr int kProductThreads = 384;
constexpr int kStageA = kTileA * kBlockK * 2;  // bytes
constexpr int kStageX = kTileRows * kBlockK * 2;
constexpr int kStageBytes = kStageA + kStageX;
constexpr int kStoreBytes = 16 * 64 * 2;  // 16 rows of 64 features

struct ProductBarriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t late;
};
constexpr int kProductShared = kStages * kStageBytes + 4 * kStoreBytes + sizeof(ProductBarriers);
static_assert(kProductShared <= 232448);

// Tile t: over experts, then tiles of A, then tiles of rows, so that those which share weights run together.
struct Tile {
  RowTile rows;
  int a_tile;
};
__device__ __forceinline__ Tile tile_at(const ProductArgs& args, int t) {
  const RowTile any = args.tiles[t / args.a_tiles];  // some tile of the expert
  const int local = t - any.first * args.a_tiles;
  const int a_tile = local / any.count;
  return {args.tiles[any.first + local - a_tile * any.count], a_tile};
}

// The width that wgmma takes for a tile.
__device__ __forceinline__ int padded_rows(int rows) {
  return rows <= 16    ? 16
         : rows <= 32  ? 32
         : rows <= 64  ? 64
         : rows <= 96  ? 96
         : rows <= 144 ? (rows + 15) / 16 * 16
                       : rows;
}

template <Product kProduct>
__device__ __forceinline__ void load_weights(const ProductArgs& args, const Tile& tile, int kb, uint8_t* a,
                                             uint64_t* full) {
  const int k = kb * kBlockK, e = tile.rows.expert, row = tile.a_tile * (is_pair(kProduct) ? 128 : 256);
  if constexpr ((kProduct == Product::kTransposed)) {
    const bool second = kb >= args.first_blocks;
    const int from = second ? k - args.first_blocks * kBlockK : k;
    for (int i = 0; i < 4; ++i)
      tensor_load(a + i * (kStageA / 4), &args.a[second], row + i * 64, from, e, full);
  } else {
    tensor_load(a, &args.a[0], k, row, e, full);
    tensor_load(a + kStageA / 2, &args.a[is_pair(kProduct)], k, is_pair(kProduct) ? row : row + 128, e, full);
  }
}

template <Product kProduct>
__device__ void produce(const ProductArgs& args, uint8_t* shared, ProductBarriers& bar) {
  const int tiles = args.totals[1] * args.a_tiles;
  int at = 0;  // blocks of k so far
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Tile tile = tile_at(args, t);
    const int width = padded_rows(tile.rows.rows);
    for (int kb = 0; kb < args.k_blocks; ++kb, ++at) {
      const int stage = at % kStages;
      uint8_t* a = shared + stage * kStageBytes;
      uint8_t* x = a + kStageA;
      uint64_t* full = &bar.full[stage];
      mbarrier_wait(&bar.empty[stage], (at / kStages + 1) & 1);
      mbarrier_arrive_expect(full, kStageA + width * kBlockK * 2);
      load_weights<kProduct>(args, tile, kb, a, full);
      const bool second = (kProduct == Product::kTransposed) && kb >= args.first_blocks;
      const int k = second ? args.second_column + (kb - args.first_blocks) * kBlockK : kb * kBlockK;
      int r = 0;
      for (; r + 32 <= width; r += 32) tensor_load(x + r * 128, &args.x32, k, tile.rows.begin + r, 0, full);
      for (; r < width; r += 8) tensor_load(x + r * 128, &args.x8, k, tile.rows.begin + r, 0, full);
    }
  }
}

__device__ __forceinline__ void release(ProductBarriers& bar, int stage) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(&bar.empty[stage]);
}

// A consumer's state: which warpgroup it is and where the ring stands.
struct Consumer {
  uint8_t* shared;
  uint8_t* store;  // two buffers of kStoreBytes
  ProductBarriers* bar;
  int group;
  int at;  // blocks of k so far
};

// Where a thread stands while 16 rows by 64 features go from fragments to memory: it takes 8 features of one
// row.
struct StoreLane {
  uint32_t write;  // bytes into the buffer: for stmatrix, and of the thread's 16 bytes
  uint32_t read;
  int row;
  int feature;
  __device__ StoreLane() {
    const int thread = threadIdx.x % 128, lane = threadIdx.x % 32, warp = thread / 32;
    const int at = lane / 16 * 8 + lane % 8, unit = 2 * warp + lane / 8 % 2;
    write = at * 128 + ((unit ^ (at & 7)) << 4);
    row = thread / 8, feature = thread % 8 * 8;
    read = row * 128 + (((thread % 8) ^ (row & 7)) << 4);
  }
};

// Puts 16 rows, those of wgmma's 8-row groups `first` and first + 1, into the buffer; value(group, i) is
// element i of a group's fragment.
template <int N, class Value>
__device__ __forceinline__ void stage_rows(uint8_t* buffer, const StoreLane& at, int first,
                                           const Value& value) {
  uint32_t r[4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      r[2 * j + h] = first + j < N / 8 ? pack_bf16(value(first + j, 2 * h), value(first + j, 2 * h + 1)) : 0u;
    }
  }
  stmatrix_x4_trans(smem_address(buffer) + at.write, r);
}

// Where 64 features of some rows go: value f of row r to out[r stride + f], f < features.
struct RowTarget {
  __nv_bfloat16* out;
  int stride;
  int features;
};
template <int N, class Value>
__device__ __forceinline__ void store_rows(const Consumer& c, const RowTarget& to, const Tile& tile,
                                           const StoreLane& at, int pass, int first, int feature,
                                           const Value& value) {
  uint8_t* buffer = c.store + (pass & 1) * kStoreBytes;
  stage_rows<N>(buffer, at, first, value);
  named_barrier(1 + c.group, 128);
  const uint4 v = *reinterpret_cast<const uint4*>(buffer + at.read);
  const int row = first * 8 + at.row, f = feature + at.feature;
  if (row < tile.rows.rows && f < to.features) {
    *reinterpret_cast<uint4*>(to.out + int64_t(tile.rows.begin + row) * to.stride + f) = v;
  }
}

// Every index into d is a constant once the loops are unrolled. There is little else in them: code of this
// size that runs once a tile comes from memory every time (docs/moe_cuda.md, what did not help).
template <int N, Product kProduct>
__device__ __forceinline__ void epilogue(const ProductArgs& args, const Consumer& c, const Tile& tile,
                                         const float (&d)[2][N / 2]) {
  const GluConstants form(args.form);
  const StoreLane at;
  const RowTarget to{args.out, args.features, args.features};
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    if constexpr (is_pair(kProduct)) {
      constexpr int kPasses = kProduct == Product::kGluKeep ? 3 : 1;
      const int pass = j / 2 * kPasses, feature = tile.a_tile * 128 + c.group * 64;
      store_rows<N>(c, to, tile, at, pass, j, feature,
                    [&](int g, int i) { return glu(d[0][4 * g + i], d[1][4 * g + i], form); });
      if constexpr (kProduct == Product::kGluKeep) {
        const RowTarget gate{args.gate_up, 2 * args.features, args.features};
        const RowTarget up{args.gate_up + args.features, 2 * args.features, args.features};
        store_rows<N>(c, gate, tile, at, pass + 1, j, feature, [&](int g, int i) { return d[0][4 * g + i]; });
        store_rows<N>(c, up, tile, at, pass + 2, j, feature, [&](int g, int i) { return d[1][4 * g + i]; });
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_rows<N>(c, to, tile, at, half, j, tile.a_tile * 256 + c.group * 128 + half * 64,
                      [&](int g, int i) { return d[half][4 * g + i]; });
      }
    }
  }
}

// A warpgroup's half of a tile. Of the first tile, `lead` tells the other when to start and `trail` waits for
// it.
template <int N, Product kProduct>
__device__ __forceinline__ void consume(const ProductArgs& args, Consumer& c, const Tile& tile, bool lead,
                                        bool trail) {
  constexpr bool kPairs = is_pair(kProduct);
  constexpr int kTrans = (kProduct == Product::kTransposed);
  constexpr int kStep = kTrans ? 16 * 128 / 16 : 32 / 16;  // of 16 k, in the descriptor's units
  float d[2][N / 2];
  clear(d[0]), clear(d[1]);
  // Bytes from the stage's start to this warpgroup's first and second 64 rows of A.
  const int first = c.group * (kPairs ? 64 : 128) * 128, second = first + (kPairs ? 128 : 64) * 128;
  if (trail) mbarrier_wait(&c.bar->late, 0);
  for (int kb = 0; kb < args.k_blocks; ++kb, ++c.at) {
    const int stage = c.at % kStages;
    mbarrier_wait(&c.bar->full[stage], c.at / kStages & 1);
    const uint32_t base = smem_address(c.shared + stage * kStageBytes);
    const uint64_t a0 = wgmma_descriptor(base + first, 1024, 0),
                   a1 = wgmma_descriptor(base + second, 1024, 0);
    const uint64_t x = wgmma_descriptor(base + kStageA, 1024, 0);
    wgmma_fence();
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      Wgmma<N>::template smem<kTrans, 0>(d[0], a0 + kStep * kk, x + 2 * kk);
      Wgmma<N>::template smem<kTrans, 0>(d[1], a1 + kStep * kk, x + 2 * kk);
    }
    wgmma_commit();
    if (kb > 0) {
      wgmma_wait<1>();
      release(*c.bar, (c.at - 1) % kStages);
    }
    if (lead && kb == min(kStages - 1, args.k_blocks - 1) && threadIdx.x % 128 == 0)
      mbarrier_arrive(&c.bar->late);
  }
  wgmma_wait<0>();
  pin(d[0]), pin(d[1]);
  release(*c.bar, (c.at - 1) % kStages);
  epilogue<N, kProduct>(args, c, tile, d);
}

__device__ __forceinline__ void init_barriers(ProductBarriers& bar) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(&bar.full[i], 1), mbarrier_init(&bar.empty[i], 8);
    mbarrier_init(&bar.late, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
}

template <Product kProduct>
__global__ void __launch_bounds__(kProductThreads, 1)
    product_kernel(const __grid_constant__ ProductArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* store = shared + kStages * kStageBytes;
  ProductBarriers& bar = *reinterpret_cast<ProductBarriers*>(store + 4 * kStoreBytes);
  const int role = uniform(threadIdx.x / 128);
  init_barriers(bar);
  if (role == 0) {
    registers_down<24>();
    if (threadIdx.x == 0) produce<kProduct>(args, shared, bar);
  } else {
    registers_up<240>();
    Consumer c{shared, store + (role - 1) * 2 * kStoreBytes, &bar, role - 1, 0};
    const int tiles = args.totals[1] * args.a_tiles, begin = blockIdx.x;
    for (int t = begin; t < tiles; t += gridDim.x) {
      const Tile tile = tile_at(args, t);
      const bool lead = t == begin && c.group == 0, trail = t == begin && c.group == 1;
      switch (uniform(padded_rows(tile.rows.rows))) {
#define GODWIT_WIDTH(N)                               \
  case N:                                             \
    consume<N, kProduct>(args, c, tile, lead, trail); \
    break;
        GODWIT_WIDTH(16)
        GODWIT_WIDTH(32)
        GODWIT_WIDTH(64)
        GODWIT_WIDTH(96)
        GODWIT_WIDTH(112)
        GODWIT_WIDTH(128)
        GODWIT_WIDTH(144)
        GODWIT_WIDTH(152)
        GODWIT_WIDTH(160)
        GODWIT_WIDTH(168)
        GODWIT_WIDTH(176)
#undef GODWIT_WIDTH
      }
    }
  }
}

// x [rows, width], sorted by expert, in boxes of 64 k by box_rows.
inline cudaError_t row_map(CUtensorMap* map, const ExpertPlan& plan, const void* x, int64_t width,
                           int box_rows) {
  return make_tensor_map(map, {.base = x,
                               .size = {uint64_t(width), uint64_t(plan.max_rows), 1},
                               .stride = {uint64_t(width), uint64_t(width * plan.max_rows)},
                               .box = {kBlockK, uint32_t(box_rows), 1}});
}
inline cudaError_t row_maps(ProductArgs* args, const ExpertPlan& plan, const void* x, int64_t width) {
  const cudaError_t error = row_map(&args->x32, plan, x, width, 32);
  return error == cudaSuccess ? row_map(&args->x8, plan, x, width, 8) : error;
}
// w [experts, rows, columns], in boxes of 64 columns by box_rows.
inline cudaError_t weight_map(CUtensorMap* map, const void* w, int64_t experts, int64_t rows, int64_t columns,
                              int box_rows = 128) {
  return make_tensor_map(map, {.base = w,
                               .size = {uint64_t(columns), uint64_t(rows), uint64_t(experts)},
                               .stride = {uint64_t(columns), uint64_t(columns * rows)},
                               .box = {64, uint32_t(box_rows), 1}});
}

// One for all products: the weights are [experts, features, k], for transposed products [experts, k,
// features]. Of a transposed product's two weights the second takes x's columns from k on, and the products
// are added.
struct Operands {
  const void* first = nullptr;
  const void* second = nullptr;  // pairs, and transposed products of two weights
  int64_t experts = 0;
  int64_t features = 0;
  int64_t k = 0;
  const void* x = nullptr;
  void* out = nullptr;
};
inline cudaError_t product_args(Product product, const ExpertPlan& plan, const Operands& o,
                                ProductArgs* args) {
  const bool transposed = product == Product::kTransposed, added = transposed && o.second != nullptr;
  const int tile = is_pair(product) ? kTileA / 2 : kTileA, terms = added ? 2 : 1;
  args->tiles = plan.tiles, args->totals = plan.totals;
  args->a_tiles = int((o.features + tile - 1) / tile);
  args->first_blocks = int((o.k + kBlockK - 1) / kBlockK);
  args->k_blocks = terms * args->first_blocks;
  args->second_column = int(o.k);
  args->features = int(o.features);
  args->out = static_cast<__nv_bfloat16*>(o.out);
  const auto weights = [&](CUtensorMap* map, const void* w) {
    if (w == nullptr) return cudaSuccess;
    return transposed ? weight_map(map, w, o.experts, o.k, o.features, 64)
                      : weight_map(map, w, o.experts, o.features, o.k);
  };
  cudaError_t error = row_maps(args, plan, o.x, terms * o.k);
  if (error == cudaSuccess) error = weights(&args->a[0], o.first);
  return error == cudaSuccess ? weights(&args->a[1], o.second) : error;
}

// A kernel with one block a multiprocessor, or more. overlap: it may start while the kernel before it ends
// (ptx.cuh, wait_for_prerequisites).
template <class Args>
cudaError_t launch_persistent(void (*kernel)(Args), const Args& args, int threads, int shared_bytes,
                              cudaStream_t stream, int each = 1, bool overlap = false) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(processors * each), config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &attribute, config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, args);
}
template <Product kProduct>
cudaError_t launch_product(const ProductArgs& args, cudaStream_t stream) {
  return launch_persistent(product_kernel<kProduct>, args, kProductThreads, kProductShared, stream);
}

}  // namespace godwit::kernels::cuda::sm90
