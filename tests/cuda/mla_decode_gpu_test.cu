// Checks mla_decode on a GPU against fp64 and against properties that must hold bit for bit, and times it.
// Standalone: mla_decode_gpu_test [check|time|small]...; prints one line a case and exits 1 if any failed.
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "godwit/kernels/mla_decode_cuda.h"
#include "tests/cuda/experts_case.cuh"

using namespace godwit::kernels::cuda;

namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) ++failures, std::printf("  FAILED: %s\n", what.c_str());
}

// Rows that no sequence owns are NaN: the tail of each sequence's last page, and pages without an owner.
__global__ void poison_rows(uint16_t* pages, int width, const uint8_t* owned) {
  const int page = blockIdx.x;
  for (int i = threadIdx.x; i < 64 * width; i += blockDim.x)
    if (i / width >= owned[page]) pages[int64_t(page) * 64 * width + i] = 0xffff;
}

// Rows become what e4m3 holds of them.
__global__ void narrow_rows(uint16_t* pages, uint8_t* bytes, int64_t n) {
  for (int64_t i = thread_index(); i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const float x = __bfloat162float(__ushort_as_bfloat16(pages[i]));
    bytes[i] = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    pages[i] = __bfloat16_as_ushort(
        __float2bfloat16(__half2float(__half(__nv_cvt_fp8_to_halfraw(bytes[i], __NV_E4M3)))));
  }
}

// The rows of some pages times a power of two: scores far above those before.
__global__ void grow_rows(uint16_t* pages, int width, const int32_t* which, float by) {
  uint16_t* const page = pages + int64_t(which[blockIdx.x]) * 64 * width;
  for (int i = threadIdx.x; i < 64 * width; i += blockDim.x)
    page[i] = __bfloat16_as_ushort(__float2bfloat16(by * __bfloat162float(__ushort_as_bfloat16(page[i]))));
}

struct Shape {
  int heads, rank = 512;
  bool fp8 = false;
};

struct Decode {
  Shape shape;
  int width;
  std::vector<int64_t> lengths;
  std::vector<int32_t> table;
  int columns = 0;
  int64_t page_count = 0, window = 0;
  float scale = 0.06f;
  Buffer<uint16_t> q, pages;
  Buffer<uint8_t> bytes;  // of the pages in e4m3
  Buffer<int32_t> device_table;
  Buffer<int64_t> device_lengths;

  Decode(Shape s, std::vector<int64_t> n, int64_t w, int seed)
      : shape(s), width(s.rank + kMlaPositions), lengths(std::move(n)), window(w) {
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    columns = int((longest + 63) / 64) + 1;
    std::vector<uint8_t> owned;
    int64_t used = 0;
    for (const int64_t length : lengths) used += (length + 63) / 64;
    page_count = used + 3;
    std::vector<int32_t> order(page_count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(seed));
    owned.assign(page_count, 0);
    table.assign(columns * lengths.size(), -1);
    int64_t next = 0;
    for (size_t i = 0; i < lengths.size(); ++i)
      for (int64_t m = 0; m * 64 < lengths[i]; ++m) {
        table[i * columns + m] = order[next];
        owned[order[next++]] = uint8_t(std::min<int64_t>(64, lengths[i] - m * 64));
      }
    q = normal(lengths.size() * s.heads * width, 1.f, seed),
    pages = normal(page_count * 64 * width, 1.f, seed + 1);
    device_table = Buffer<int32_t>(table), device_lengths = Buffer<int64_t>(lengths);
    const Buffer<uint8_t> rows(owned);
    poison_rows<<<unsigned(page_count), 256>>>(pages.get(), width, rows.get());
    if (s.fp8) {
      bytes = Buffer<uint8_t>(page_count * 64 * width);
      narrow_rows<<<1024, 256>>>(pages.get(), bytes.get(), page_count * 64 * width);
    }
    CUDA_OK(cudaDeviceSynchronize());
  }

  // Scores grow from page to page, by far from page `from` on.
  void grow(int from) {
    for (int m = from; m < columns; ++m) {
      std::vector<int32_t> which;
      for (size_t i = 0; i < lengths.size(); ++i)
        if (m * 64 < lengths[i]) which.push_back(table[i * columns + m]);
      if (which.empty()) continue;
      const Buffer<int32_t> on_device(which);
      grow_rows<<<unsigned(which.size()), 256>>>(pages.get(), width, on_device.get(),
                                                 m % 3 == 0 ? 32.f : 8.f);
      CUDA_OK(cudaDeviceSynchronize());
    }
  }

  int64_t most_pages() const { return (*std::max_element(lengths.begin(), lengths.end()) + 63) / 64; }
  MlaDecodeParams params(int from, int count) const {
    MlaDecodeParams p;
    p.sequences = count, p.heads = shape.heads, p.rank = shape.rank, p.fp8 = shape.fp8;
    p.q = q.get() + int64_t(from) * shape.heads * width;
    p.pages = shape.fp8 ? static_cast<const void*>(bytes.get()) : pages.get();
    p.page_count = page_count, p.row_stride = width, p.page_stride = 64 * width;
    p.table = device_table.get() + from * columns, p.table_stride = columns;
    p.lengths = device_lengths.get() + from, p.window = window, p.scale = scale;
    p.cut = mla_decode_cut(p, most_pages());
    return p;
  }
  // Output and workspace are NaN before.
  std::vector<uint16_t> run(int from, int count, MlaCut cut) const {
    MlaDecodeParams p = params(from, count);
    p.cut = cut;
    const int64_t values = int64_t(count) * shape.heads * shape.rank;
    const Buffer<uint16_t> o(values);
    const Buffer<uint8_t> space(mla_decode_workspace_bytes(p) + 256);
    p.o = o.get(), p.workspace = align(space.get());
    CUDA_OK(cudaMemset(o.get(), 0xff, values * 2));
    CUDA_OK(cudaMemset(space.get(), 0xff, mla_decode_workspace_bytes(p)));
    CUDA_OK(mla_decode(p));
    CUDA_OK(cudaDeviceSynchronize());
    return o.take();
  }
};

// One block a (sequence, head).
__global__ void reference(MlaDecodeParams p, const uint16_t* pages, double* scores, int64_t stride,
                          double* o) {
  const int n = blockIdx.x / p.heads, width = p.rank + kMlaPositions;
  const int64_t length = p.lengths[n], first = p.window > 0 ? max(int64_t(0), length - p.window) : 0;
  double* s = scores + blockIdx.x * stride;
  const auto row = [&](int64_t r) {
    return pages + (int64_t(p.table[n * p.table_stride + r / 64]) * 64 + r % 64) * width;
  };
  const uint16_t* q = static_cast<const uint16_t*>(p.q) + int64_t(blockIdx.x) * width;
  for (int64_t r = first + threadIdx.x; r < length; r += blockDim.x) {
    double sum = 0;
    for (int c = 0; c < width; ++c) sum += wide(q[c]) * wide(row(r)[c]);
    s[r] = sum * p.scale;
  }
  __syncthreads();
  double top = -INFINITY, all = 0;
  for (int64_t r = first; r < length; ++r) top = max(top, s[r]);
  for (int64_t r = first; r < length; ++r) all += exp(s[r] - top);
  for (int c = threadIdx.x; c < p.rank; c += blockDim.x) {
    double sum = 0;
    for (int64_t r = first; r < length; ++r) sum += exp(s[r] - top) * wide(row(r)[c]);
    o[int64_t(blockIdx.x) * p.rank + c] = length > 0 ? sum / all : 0;
  }
}

struct Options {
  int64_t window = 0;
  MlaCut cut = {.part_pages = 0, .parts = 0};  // parts 0: what suits
  int grow_from = -1;
};

void check(Shape shape, std::vector<int64_t> lengths, int seed, Options options = {}) {
  Decode d(shape, lengths, options.window, seed);
  if (options.grow_from >= 0) d.grow(options.grow_from);
  const int count = int(lengths.size()), heads = shape.heads;
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  const MlaCut cut = options.cut.parts > 0 ? options.cut : d.params(0, count).cut;
  const std::vector<uint16_t> got = d.run(0, count, cut);
  const Buffer<double> scores(int64_t(count) * heads * longest), o(got.size());
  reference<<<count * heads, 128>>>(d.params(0, count), d.pages.get(), scores.get(), longest, o.get());
  CUDA_OK(cudaDeviceSynchronize());
  const double error = relative_error(got, o.take());
  const std::string name = "H " + std::to_string(heads) + " R " + std::to_string(shape.rank) +
                           (shape.fp8 ? " fp8" : "") + " N " + std::to_string(count) + " longest " +
                           std::to_string(longest) + " window " + std::to_string(options.window) + " cut " +
                           std::to_string(cut.part_pages) + ", " + std::to_string(cut.parts) +
                           (options.grow_from >= 0 ? " growing" : "");
  std::printf("mla %-60s %.2e\n", name.c_str(), error);
  expect(error < 8e-3, name + " error");
  expect(d.run(0, count, cut) == got, name + " not deterministic");
  const int last = count - 1;
  const std::vector<uint16_t> alone = d.run(last, 1, cut);
  expect(std::equal(alone.begin(), alone.end(), got.begin() + int64_t(last) * heads * shape.rank),
         name + " differs alone");
}

// Cuts of part_pages 0 are those of a launch that knows no lengths.
void check_shape(Shape s) {
  for (const int64_t length : {1, 15, 16, 17, 63, 64, 65, 129, 257}) check(s, {length, 100}, int(length));
  const std::vector<int64_t> mixed = {3000, 1, 640, 64, 4097};
  check(s, mixed, 1), check(s, mixed, 2, {.window = 100});
  check(s, {3000, 0, 64, 4097}, 3, {.cut = {.part_pages = 0, .parts = 26}});
  check(s, {3000, 0, 64, 4097}, 3, {.window = 1000, .cut = {.part_pages = 0, .parts = 3}});
  check(s, {2000}, 4, {.cut = {.part_pages = 7, .parts = 5}});
}
void check_all() {
  for (const int heads : {1, 12, 16, 32, 48, 64, 96}) check_shape({heads});
  for (const int heads : {6, 40, 96}) {
    check_shape({heads, 256});
    for (const int rank : {256, 512}) check_shape({heads, rank, true});
  }
  check({200}, {300, 65}, 5);
  check({12}, {2000, 70}, 4, {.window = 65, .cut = {.part_pages = 5, .parts = 7}});
  for (const int heads : {12, 64, 96})
    for (const int from : {0, 1, 2, 5, 30})
      check({heads}, {2000, 70, 640, 1920}, 6, {.cut = {.part_pages = 40, .parts = 1}, .grow_from = from});
}

__global__ void spin(long long cycles) {
  for (const long long start = clock64(); clock64() - start < cycles;) continue;
}

// queued: the call is made while the GPU is busy, so that the host's part of it takes no time.
double median_ms(const std::function<void()>& f, bool queued) {
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    if (queued) spin<<<1, 1>>>(100000);
    cudaEventRecord(a), f(), cudaEventRecord(b), cudaEventSynchronize(b);
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 3) times.push_back(ms);
    cudaEventDestroy(a), cudaEventDestroy(b);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// A cache larger than L2 at batch 1 as well: calls take turns among copies of the sequence. known: the host
// knows the lengths.
void time_one(Shape shape, int batch, int64_t length, bool known = true) {
  const int copies = batch == 1 ? 4 : 1;
  const Decode d(shape, std::vector<int64_t>(batch * copies, length), 0, 1);
  MlaDecodeParams p = d.params(0, batch);
  p.cut = mla_decode_cut(p, known ? length / 64 : 0);
  const Buffer<uint16_t> o(int64_t(batch) * shape.heads * shape.rank);
  const Buffer<uint8_t> space(mla_decode_workspace_bytes(p) + 256);
  int turn = 0;
  const auto call = [&] {
    MlaDecodeParams now = d.params(turn++ % copies * batch, batch);
    now.cut = p.cut, now.o = o.get(), now.workspace = align(space.get());
    CUDA_OK(mla_decode(now));
  };
  const double alone = median_ms(call, false), ms = median_ms(call, true);
  const double bytes = double(batch) * length * d.width * (shape.fp8 ? 1 : 2),
               flops = double(batch) * length * shape.heads * 2 * (d.width + shape.rank);
  const double floor = std::max(bytes / 4.25e9, flops / 780e9);
  std::printf(
      "mla H %2d R %d%s batch %2d length %ld cut %d, %d: %.4f ms (%.4f from an idle GPU) %.2f TB/s %4.0f "
      "TFLOP/s, %.0f %% of the limit (%.4f ms at 4.25 TB/s, 780 TFLOP/s)\n",
      shape.heads, shape.rank, shape.fp8 ? " fp8" : "", batch, long(length), p.cut.part_pages, p.cut.parts,
      ms, alone, bytes / ms / 1e9, flops / ms / 1e9, 100 * floor / ms, floor);
}

void time_all() {
  for (const int heads : {12, 32, 96})
    for (const int batch : {1, 32}) time_one({heads}, batch, 131072);
  for (const int heads : {12, 96}) time_one({heads}, 32, 8192), time_one({heads}, 32, 1024, false);
  for (const int heads : {12, 96})
    for (const int batch : {1, 32}) time_one({heads, 512, true}, batch, 131072);
  for (const bool fp8 : {false, true})
    time_one({6, 256, fp8}, 1, 131072, false), time_one({6, 256, fp8}, 32, 8192, false),
        time_one({6, 256, fp8}, 1, 1048576, false);
}

void check_few() {
  check({12}, {130, 5}, 1), check({96}, {130, 5}, 1, {.window = 70});
  check({96}, {330, 64, 65}, 1, {.cut = {.part_pages = 2, .parts = 3}});
  check({64}, {500}, 1, {.cut = {.part_pages = 8, .parts = 1}, .grow_from = 2});
  check({6, 256}, {130, 0, 65}, 2), check({6, 256, true}, {130, 0, 65}, 2), check({20, 512, true}, {300}, 2);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string what = argv[i];
    if (what == "check") check_all();
    if (what == "small") check_few();
    if (what == "time") time_all();
    if (what == "time96")
      for (const int batch : {1, 32}) time_one({96}, batch, 131072);
    if (what == "time12") time_one({12}, 1, 131072);
  }
  std::printf("%s\n", failures == 0 ? "ok" : "FAILED");
  return failures != 0;
}
