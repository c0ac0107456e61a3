// mla_decode on a GPU against a recurrence in double on the CPU, and its time beside the bytes it reads. No torch:
//   nvcc -O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -I. tests/cuda/mla_decode_gpu_test.cu
//   godwit/kernels/cuda/mla_decode.cu -o mla_decode_gpu_test
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "godwit/kernels/mla_decode_params.h"

using namespace godwit::kernels::cuda;

namespace {

void check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
  std::exit(1);
}

template <class T>
T* on_device(const std::vector<T>& x) {
  T* p = nullptr;
  check(cudaMalloc(&p, std::max<size_t>(16, x.size() * sizeof(T))), "cudaMalloc");
  check(cudaMemcpy(p, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
  return p;
}

__nv_bfloat16 bf(float x) { return __float2bfloat16(x); }
double value(__nv_bfloat16 x) { return __bfloat162float(x); }

struct Case {
  int H, D, R;
  int64_t window;
  std::vector<int64_t> lengths;
  bool fp8 = false;
};

// Largest error over the largest entry.
double run(const Case& c) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 1);
  const int N = static_cast<int>(c.lengths.size());
  int64_t most = 1, pages = 1;
  for (const int64_t length : c.lengths) most = std::max(most, (length + 63) / 64), pages += (length + 63) / 64;
  std::vector<__nv_bfloat16> rows(pages * 64 * c.D, bf(NAN)), q(N * c.H * c.D);
  std::vector<int32_t> table(N * most, 0);
  std::vector<int32_t> order;
  for (int64_t i = 0; i < pages; ++i) order.push_back(static_cast<int32_t>(i));
  std::shuffle(order.begin(), order.end(), random);
  size_t next = 0;
  for (int n = 0; n < N; ++n) {
    for (int64_t m = 0; m * 64 < c.lengths[n]; ++m) {
      const int32_t page = table[n * most + m] = order[next++];
      const int64_t used = std::min<int64_t>(64, c.lengths[n] - m * 64);  // NaN in the others
      for (int64_t i = 0; i < used * c.D; ++i) rows[int64_t(page) * 64 * c.D + i] = bf(normal(random));
    }
  }
  for (auto& x : q) x = bf(normal(random) * 0.5f);
  std::vector<uint8_t> bytes;
  if (c.fp8) {  // rows become what e4m3 holds of them
    for (auto& x : rows) {
      bytes.push_back(__nv_cvt_float_to_fp8(__bfloat162float(x), __NV_SATFINITE, __NV_E4M3));
      x = bf(__half2float(__half(__nv_cvt_fp8_to_halfraw(bytes.back(), __NV_E4M3))));
    }
  }
  MlaDecodeParams p{.q = on_device(q),
                    .pages = c.fp8 ? static_cast<const void*>(on_device(bytes)) : on_device(rows),
                    .table = on_device(table),
                    .lengths = on_device(c.lengths),
                    .table_stride = most,
                    .N = N,
                    .H = c.H,
                    .D = c.D,
                    .rank = c.R,
                    .fp8 = c.fp8,
                    .window = c.window,
                    .scale = 0.07f};
  std::vector<__nv_bfloat16> o(N * c.H * c.R);
  p.o = on_device(o);
  check(cudaMalloc(&p.workspace, mla_decode_workspace_bytes(p)), "workspace");
  check(mla_decode(p), "mla_decode");
  check(cudaDeviceSynchronize(), "run");
  check(cudaMemcpy(o.data(), p.o, o.size() * 2, cudaMemcpyDeviceToHost), "copy back");
  double worst = 0, largest = 0;
  for (int n = 0; n < N; ++n) {
    for (int h = 0; h < c.H; ++h) {
      const int64_t length = c.lengths[n], first = c.window > 0 ? std::max<int64_t>(0, length - c.window) : 0;
      std::vector<double> score, out(c.R, 0.0);
      double top = -1e300, sum = 0;
      const auto row = [&](int64_t r) { return rows.data() + (int64_t(table[n * most + r / 64]) * 64 + r % 64) * c.D; };
      for (int64_t r = first; r < length; ++r) {
        double s = 0;
        for (int d = 0; d < c.D; ++d) s += value(q[(n * c.H + h) * c.D + d]) * value(row(r)[d]);
        score.push_back(s * 0.07f);
        top = std::max(top, score.back());
      }
      for (int64_t r = first; r < length; ++r) {
        const double w = std::exp(score[r - first] - top);
        sum += w;
        for (int d = 0; d < c.R; ++d) out[d] += w * value(row(r)[d]);
      }
      for (int d = 0; d < c.R; ++d) {
        const double expected = length > first ? out[d] / sum : 0, got = value(o[(n * c.H + h) * c.R + d]);
        largest = std::max(largest, std::abs(expected));
        worst = std::max(worst, std::isfinite(got) ? std::abs(got - expected) : 1e9);
      }
    }
  }
  for (const void* m : {p.q, p.pages, static_cast<const void*>(p.table), static_cast<const void*>(p.lengths),
                        static_cast<const void*>(p.o), static_cast<const void*>(p.workspace)})
    cudaFree(const_cast<void*>(m));
  return worst / largest;
}

void time_one(int N, int H, int D, int R, int64_t length, bool fp8 = false) {
  const int64_t most = (length + 63) / 64;
  MlaDecodeParams p{.table_stride = most, .N = N, .H = H, .D = D, .rank = R, .fp8 = fp8, .scale = 0.07f};
  std::vector<int32_t> table(N * most);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  p.table = on_device(table);
  p.lengths = on_device(std::vector<int64_t>(N, length));
  void *q = nullptr, *pages = nullptr;
  const size_t bytes = size_t(N) * most * 64 * D * (fp8 ? 1 : 2);
  check(cudaMalloc(&q, size_t(N) * H * D * 2), "q"), check(cudaMalloc(&pages, bytes), "pages");
  check(cudaMalloc(&p.o, size_t(N) * H * R * 2), "o");
  cudaMemset(q, 0, size_t(N) * H * D * 2), cudaMemset(pages, 0, bytes);
  p.q = q, p.pages = pages;
  check(cudaMalloc(&p.workspace, mla_decode_workspace_bytes(p)), "workspace");
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  float best = 1e9f;
  for (int i = 0; i < 20; ++i) {
    cudaEventRecord(a);
    check(mla_decode(p), "mla_decode");
    cudaEventRecord(b);
    check(cudaEventSynchronize(b), "sync");
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    best = std::min(best, ms);
  }
  std::printf("time N %d H %d D %d length %lld%s: %.4f ms, %.2f TB/s\n", N, H, D, static_cast<long long>(length),
              fp8 ? " fp8" : "", best, bytes / best * 1e-9);
  cudaFree(q), cudaFree(pages), cudaFree(p.o), cudaFree(p.workspace);
}

}  // namespace

int main() {
  const std::vector<int64_t> lengths = {1, 15, 16, 17, 63, 64, 65, 257, 0, 3000};
  bool good = true;
  for (const Case& c : {Case{6, 320, 256, 0, lengths}, Case{6, 320, 256, 100, lengths}, Case{16, 576, 512, 0, lengths},
                        Case{40, 576, 512, 0, lengths}, Case{2, 128, 64, 0, {40000}},
                        Case{6, 320, 256, 0, lengths, true}, Case{16, 576, 512, 100, lengths, true}}) {
    const double error = run(c);
    const bool ok = error < 1e-2;  // weights and results are rounded to bf16: 2^-8 each
    good = good && ok;
    std::printf("%s H %d D %d R %d window %lld%s: %.2e\n", ok ? "ok" : "WRONG", c.H, c.D, c.R,
                static_cast<long long>(c.window), c.fp8 ? " fp8" : "", error);
  }
  for (const int64_t length : {int64_t{1024}, int64_t{32768}, int64_t{262144}, int64_t{1048576}})
    time_one(1, 6, 320, 256, length);
  for (const int64_t length : {int64_t{32768}, int64_t{1048576}}) time_one(1, 6, 320, 256, length, true);
  time_one(32, 6, 320, 256, 8192);
  time_one(1, 96, 576, 512, 262144);
  return good ? 0 : 1;
}
