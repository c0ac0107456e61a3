// Checks mla_decode_long on a GPU against fp64 and against properties that must hold bit for bit, and times
// it. Standalone: mla_decode_long_gpu_test [check|time|small]...; prints one line a case and exits 1 if any
// failed.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "godwit/kernels/mla_decode_long.h"
#include "tests/cuda/experts_case.cuh"

using namespace godwit::kernels::cuda;

namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) ++failures, std::printf("  FAILED: %s\n", what.c_str());
}

__global__ void poison_rows(uint16_t* pages, const int32_t* table, int columns, const int64_t* lengths,
                            int64_t page_count, const uint8_t* owned) {
  // Rows that no sequence owns are NaN: the tail of each sequence's last page, and pages without an owner.
  const int page = blockIdx.x;
  for (int i = threadIdx.x; i < 64 * kMlaWidth; i += blockDim.x)
    if (i / kMlaWidth >= owned[page]) pages[int64_t(page) * 64 * kMlaWidth + i] = 0xffff;
}

struct Decode {
  int heads;
  std::vector<int64_t> lengths;
  std::vector<int32_t> table;
  int columns = 0;
  int64_t page_count = 0, window = 0;
  float scale = 0.06f;
  Buffer<uint16_t> q, pages;
  Buffer<int32_t> device_table;
  Buffer<int64_t> device_lengths;

  Decode(int h, std::vector<int64_t> n, int64_t w, int seed) : heads(h), lengths(std::move(n)), window(w) {
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
    q = normal(lengths.size() * heads * kMlaWidth, 1.f, seed),
    pages = normal(page_count * 64 * kMlaWidth, 1.f, seed + 1);
    device_table = Buffer<int32_t>(table), device_lengths = Buffer<int64_t>(lengths);
    const Buffer<uint8_t> rows(owned);
    poison_rows<<<unsigned(page_count), 256>>>(pages.get(), device_table.get(), columns, device_lengths.get(),
                                               page_count, rows.get());
    CUDA_OK(cudaDeviceSynchronize());
  }

  int parts(int part_pages) const {
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    return int(((longest + 63) / 64 + part_pages - 1) / part_pages);
  }

  MlaDecodeLongParams params(int from, int count, int part_pages) const {
    MlaDecodeLongParams p;
    p.sequences = count, p.heads = heads, p.q = q.get() + int64_t(from) * heads * kMlaWidth,
    p.pages = pages.get();
    p.page_count = page_count, p.row_stride = kMlaWidth, p.page_stride = 64 * kMlaWidth,
    p.table = device_table.get() + from * columns, p.table_stride = columns;
    p.lengths = device_lengths.get() + from, p.window = window, p.part_pages = part_pages,
    p.parts = parts(part_pages), p.scale = scale;
    return p;
  }

  std::vector<uint16_t> run(int from, int count, int part_pages) const {
    MlaDecodeLongParams p = params(from, count, part_pages);
    const Buffer<uint16_t> o(int64_t(count) * heads * kMlaRank);
    const Buffer<uint8_t> space(mla_decode_long_workspace_bytes(count, heads, p.parts) + 256);
    p.o = o.get(), p.workspace = align(space.get());
    CUDA_OK(mla_decode_long(p));
    CUDA_OK(cudaDeviceSynchronize());
    return o.take();
  }
};

// One block a (sequence, head).
__global__ void reference(MlaDecodeLongParams p, double* scores, int64_t stride, double* o) {
  const int n = blockIdx.x / p.heads;
  const int64_t length = p.lengths[n], first = p.window > 0 ? max(int64_t(0), length - p.window) : 0;
  double* s = scores + blockIdx.x * stride;
  const auto row = [&](int64_t r) {
    return static_cast<const uint16_t*>(p.pages) +
           (int64_t(p.table[n * p.table_stride + r / 64]) * 64 + r % 64) * kMlaWidth;
  };
  const uint16_t* q = static_cast<const uint16_t*>(p.q) + int64_t(blockIdx.x) * kMlaWidth;
  for (int64_t r = first + threadIdx.x; r < length; r += blockDim.x) {
    double sum = 0;
    for (int c = 0; c < kMlaWidth; ++c) sum += wide(q[c]) * wide(row(r)[c]);
    s[r] = sum * p.scale;
  }
  __syncthreads();
  double top = -INFINITY, all = 0;
  for (int64_t r = first; r < length; ++r) top = max(top, s[r]);
  for (int64_t r = first; r < length; ++r) all += exp(s[r] - top);
  for (int c = threadIdx.x; c < kMlaRank; c += blockDim.x) {
    double sum = 0;
    for (int64_t r = first; r < length; ++r) sum += exp(s[r] - top) * wide(row(r)[c]);
    o[int64_t(blockIdx.x) * kMlaRank + c] = sum / all;
  }
}

void check(int heads, std::vector<int64_t> lengths, int64_t window, int seed, int part_pages = 0) {
  const Decode d(heads, lengths, window, seed);
  const int count = int(lengths.size());
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  if (part_pages == 0) part_pages = mla_decode_long_part_pages((longest + 63) / 64, count, heads);
  const std::vector<uint16_t> got = d.run(0, count, part_pages);
  const Buffer<double> scores(int64_t(count) * heads * longest), o(got.size());
  reference<<<count * heads, 128>>>(d.params(0, count, 1), scores.get(), longest, o.get());
  CUDA_OK(cudaDeviceSynchronize());
  const double error = relative_error(got, o.take());
  const std::string name = "H " + std::to_string(heads) + " N " + std::to_string(count) + " longest " +
                           std::to_string(longest) + " window " + std::to_string(window) + " part " +
                           std::to_string(part_pages);
  std::printf("mla %-44s %.2e\n", name.c_str(), error);
  expect(error < 8e-3, name + " error");
  expect(d.run(0, count, part_pages) == got, name + " not deterministic");
  const int last = count - 1;
  const std::vector<uint16_t> alone = d.run(last, 1, part_pages);
  expect(std::equal(alone.begin(), alone.end(), got.begin() + int64_t(last) * heads * kMlaRank),
         name + " differs alone");
}

void check_all() {
  for (const int heads : {1, 12, 16, 32, 48, 64, 96}) {
    for (const int64_t length : {1, 15, 16, 17, 63, 64, 65, 129, 257})
      check(heads, {length, 100}, 0, int(length));
    check(heads, {3000, 1, 640, 64, 4097}, 0, 1);
    check(heads, {3000, 1, 640, 64, 4097}, 100, 2);
  }
  check(96, {2000}, 0, 3, 7);
  check(12, {2000, 70}, 65, 4, 5);
}

double median_ms(const std::function<void()>& f) {
  std::vector<float> times;
  for (int i = 0; i < 18; ++i) {
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    cudaEventRecord(a), f(), cudaEventRecord(b), cudaEventSynchronize(b);
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 3) times.push_back(ms);
    cudaEventDestroy(a), cudaEventDestroy(b);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// A cache larger than L2 at batch 1 as well: calls take turns among copies of the sequence.
void time_one(int heads, int batch, int64_t length) {
  const int copies = batch == 1 ? 4 : 1;
  const Decode d(heads, std::vector<int64_t>(batch * copies, length), 0, 1);
  for (const int part_pages : {mla_decode_long_part_pages(length / 64, batch, heads), kMlaPartPages}) {
    const Buffer<uint16_t> o(int64_t(batch) * heads * kMlaRank);
    const Buffer<uint8_t> space(mla_decode_long_workspace_bytes(batch, heads, d.parts(part_pages)) + 256);
    int turn = 0;
    const double ms = median_ms([&] {
      MlaDecodeLongParams p = d.params(turn++ % copies * batch, batch, part_pages);
      p.o = o.get(), p.workspace = align(space.get());
      CUDA_OK(mla_decode_long(p));
    });
    const double bytes = double(batch) * length * kMlaWidth * 2,
                 flops = double(batch) * length * heads * 2 * (kMlaWidth + kMlaRank);
    const double floor = std::max(bytes / 4.25e9, flops / 780e9);
    std::printf(
        "mla H %2d batch %2d length %ld part %3d: %.4f ms %.2f TB/s %4.0f TFLOP/s, %.0f %% of the limit "
        "(%.4f ms at 4.25 TB/s, 780 "
        "TFLOP/s)\n",
        heads, batch, long(length), part_pages, ms, bytes / ms / 1e9, flops / ms / 1e9, 100 * floor / ms,
        floor);
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string what = argv[i];
    if (what == "check") check_all();
    if (what == "time") {
      for (const int heads : {12, 32, 96})
        for (const int batch : {1, 32}) time_one(heads, batch, 131072);
      time_one(96, 32, 8192), time_one(12, 32, 8192);
    }
    if (what == "small") check(12, {130, 5}, 0, 1), check(96, {130, 5}, 70, 1);
  }
  std::printf("%s\n", failures == 0 ? "ok" : "FAILED");
  return failures != 0;
}
