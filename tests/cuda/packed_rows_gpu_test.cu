// Checks the products with int8 and MXFP4 weights of any width on a GPU against fp64 sums and against
// properties that must hold bit for bit, and times them beside bf16. Standalone: packed_rows_gpu_test
// [experts|linear|time|small]...; prints one line a case and exits 1 if any failed.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "godwit/kernels/cuda/sm90/packed_rows.h"
#include "godwit/kernels/linear_rows_cuda.h"
#include "godwit/kernels/moe_experts_cuda.h"
#include "tests/cuda/experts_case.cuh"

using namespace godwit::kernels;
using namespace godwit::kernels::cuda;

namespace {

// bf16 operands and a rounded inner activation, fp32 sums; the reference's int8 weights are rounded to bf16.
constexpr double kLimit = 6e-3;

void check_experts(const MoeShape& shape, Spread spread, int seed, bool int8) {
  ExpertCase c("", shape, spread, seed);
  if (int8)
    c.pack_int8();
  else
    c.pack();
  const std::vector<uint16_t> got = run_forward(c, 0, shape.tokens);
  const double error = relative_error(got, c.reference(false).out);
  std::printf("experts %-52s %.2e\n", c.name.c_str(), error);
  expect(error < kLimit, c.name + " error");
  expect(run_forward(c, 0, shape.tokens) == got, c.name + " not deterministic");
}

// A token's row does not depend on the others of its step.
void check_neighbours(bool int8) {
  const MoeShape shape{12, 4, 6, 192, 160, {4.f, 25.f}};
  ExpertCase a("", shape, Spread::kRandom, 3);
  ExpertCase b("", shape, Spread::kOne, 4);
  for (ExpertCase* c : {&a, &b}) {
    if (int8)
      c->pack_int8();
    else
      c->pack();
  }
  std::vector<int32_t> experts = b.experts.take();
  std::vector<float> weights = b.weights.take();
  std::vector<uint16_t> z = b.z.take();
  const std::vector<int32_t> one_experts = a.experts.take();
  const std::vector<float> one_weights = a.weights.take();
  const std::vector<uint16_t> one_z = a.z.take();
  std::copy_n(one_experts.begin() + 5 * 4, 4, experts.begin() + 5 * 4);
  std::copy_n(one_weights.begin() + 5 * 4, 4, weights.begin() + 5 * 4);
  std::copy_n(one_z.begin() + 5 * 192, 192, z.begin() + 5 * 192);
  b.experts.put(experts), b.weights.put(weights), b.z.put(z);
  const std::vector<uint16_t> x = run_forward(a, 0, 12), y = run_forward(b, 0, 12);
  expect(std::equal(x.begin() + 5 * 192, x.begin() + 6 * 192, y.begin() + 5 * 192),
         std::string("a row depends on its neighbours") + (int8 ? ", int8" : ", MXFP4"));
}

struct LinearCase {
  int64_t rows, in, out;
  Buffer<uint16_t> x, values;
  Buffer<uint8_t> w;
  Buffer<float> scale;
  LinearCase(int64_t r, int64_t i, int64_t o)
      : rows(r), in(i), out(o), x(normal(r * i, 1.f, 5)), values(o * i), w(o * i), scale(o) {
    fill_int8<<<2048, 256>>>(reinterpret_cast<int8_t*>(w.get()), scale.get(), values.get(), o, i, 9);
    CUDA_OK(cudaDeviceSynchronize());
  }
  LinearRowsParams params(uint16_t* y) const {
    LinearRowsParams p;
    p.rows = rows, p.in = in, p.count = 1, p.out[0] = out, p.x = x.get(), p.y[0] = y;
    p.w[0] = w.get(), p.scale[0] = scale.get(), p.int8 = true;
    return p;
  }
  UnpackInt8Params unpacking(uint16_t* y) const {
    return {
        .in = in, .out = out, .w = reinterpret_cast<const int8_t*>(w.get()), .scale = scale.get(), .y = y};
  }
};

__global__ void linear_reference(const uint16_t* x, const uint8_t* w, const float* scale, int64_t rows,
                                 int64_t in, int64_t out, double* y) {
  const int64_t at = thread_index(), r = at / out, f = at % out;
  if (r >= rows) return;
  double sum = 0;
  for (int64_t k = 0; k < in; ++k) sum += wide(x[r * in + k]) * double(int8_t(w[f * in + k]));
  y[at] = sum * double(scale[f]);
}

void check_linear(int64_t rows, int64_t in, int64_t out) {
  const LinearCase c(rows, in, out);
  const Buffer<uint16_t> y(rows * out), unpacked(in * out);
  const Buffer<double> want(rows * out);
  CUDA_OK(linear_rows(c.params(y.get())));
  linear_reference<<<unsigned((rows * out + 127) / 128), 128>>>(c.x.get(), c.w.get(), c.scale.get(), rows, in,
                                                                out, want.get());
  CUDA_OK(unpack_int8(c.unpacking(unpacked.get())));
  CUDA_OK(cudaDeviceSynchronize());
  const double error = relative_error(y.take(), want.take());
  std::printf("linear rows %3ld in %5ld out %5ld  %.2e\n", long(rows), long(in), long(out), error);
  expect(error < 3e-3, "linear error");  // the output's rounding
  expect(unpacked.take() == c.values.take(), "unpacked values differ");
}

// Several matrices at once, one of a width that fills no unit of eight: each as it is alone, and right.
void check_each(bool int8) {
  for (const int64_t rows : {1, 5, 16, 33}) {
    std::vector<LinearCase> cases;
    for (const int64_t out : {768, 6, 128, 40, 300}) cases.emplace_back(rows, 768, out);
    std::vector<Buffer<uint16_t>> y, single;
    LinearRowsParams p = cases[0].params(nullptr);
    p.count = 5, p.int8 = int8;
    for (int i = 0; i < 5; ++i) {
      y.emplace_back(rows * cases[i].out), single.emplace_back(rows * cases[i].out);
      p.out[i] = cases[i].out, p.scale[i] = cases[i].scale.get(), p.y[i] = y[i].get();
      p.w[i] = int8 ? static_cast<const void*>(cases[i].w.get()) : cases[i].values.get();
    }
    CUDA_OK(linear_rows(p));
    for (int i = 0; i < 5; ++i) {
      const LinearCase& c = cases[i];
      LinearRowsParams one = c.params(single[i].get());
      one.x = p.x, one.w[0] = p.w[i], one.int8 = int8;
      CUDA_OK(linear_rows(one));
      const Buffer<double> want(rows * c.out);
      linear_reference<<<unsigned((rows * c.out + 127) / 128), 128>>>(
          cases[0].x.get(), c.w.get(), c.scale.get(), rows, 768, c.out, want.get());
      CUDA_OK(cudaDeviceSynchronize());
      const double error = relative_error(y[i].take(), want.take());
      std::printf("each %s rows %2ld out %3ld  %.2e\n", int8 ? "int8" : "bf16", long(rows), long(c.out),
                  error);
      expect(error < 4e-3, "each error");  // bf16: the reference has the weights before their rounding
      expect(y[i].take() == single[i].take(), "each differs from one alone");
    }
  }
}

// One call in a recorded graph, as decoding has it.
double graph_us(const std::function<void(cudaStream_t)>& f) {
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreate(&stream));
  f(stream);
  CUDA_OK(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t work;
  constexpr int kCalls = 20;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < kCalls; ++i) f(stream);
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&work, graph, 0));
  float best = 1e9;
  cudaEvent_t a, b;
  cudaEventCreate(&a), cudaEventCreate(&b);
  for (int i = 0; i < 7; ++i) {
    cudaEventRecord(a, stream), cudaGraphLaunch(work, stream), cudaEventRecord(b, stream);
    CUDA_OK(cudaEventSynchronize(b));
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    best = std::min(best, ms);
  }
  cudaGraphExecDestroy(work), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
  cudaEventDestroy(a), cudaEventDestroy(b);
  return 1e3 * best / kCalls;
}

// The kernels of one forward by themselves; the weights come from the cache where they fit.
void time_parts(const MoeShape& shape, const MoeForwardParams& p) {
  sm90::ExpertPlan plan;
  plan.tile_rows = sm90::packed_rows_tile(shape);
  char* at = static_cast<char*>(p.workspace);
  at += sm90::layout_plan(shape, at, &plan);
  void* x = at;
  void* h = at + (plan.max_rows * shape.width * 2 + 255) / 256 * 256;
  const double times[] = {
      graph_us([&](cudaStream_t s) { CUDA_OK(sm90::launch_plan(plan, p.experts, int(shape.experts), s)); }),
      graph_us([&](cudaStream_t s) { CUDA_OK(sm90::launch_packed_rows_glu(plan, shape, p.w, p.z, h, s)); }),
      graph_us([&](cudaStream_t s) { CUDA_OK(sm90::launch_packed_rows_out(plan, shape, p.w, h, x, s)); }),
      graph_us([&](cudaStream_t s) { CUDA_OK(sm90::launch_combine(plan, x, p.weights, shape, p.out, s)); })};
  std::printf("    plan %.2f glu %.2f out %.2f combine %.2f us\n", times[0], times[1], times[2], times[3]);
}

// With other experts at every call, so that few weights come from the cache.
void time_experts(const MoeShape& shape, const char* name) {
  for (const int kind : {0, 1, 2}) {  // bf16, int8, MXFP4
    ExpertCase c("time", shape, Spread::kRandom, 1);
    if (kind == 1) c.pack_int8();
    if (kind == 2) c.pack(/*keep_values=*/false);
    MoeForwardParams p = c.forward(0, shape.tokens);
    const Buffer<uint8_t> space(moe_experts_fwd_workspace_bytes(shape) + 256);
    const Buffer<uint16_t> out(shape.tokens * shape.width);
    // Other experts every time: the choices are shifted.
    std::vector<Buffer<int32_t>> choices;
    for (int i = 0; i < 20; ++i) {
      std::vector<int32_t> moved = c.choices;
      for (int32_t& e : moved) e = int32_t((e + i * 41) % shape.experts);
      choices.emplace_back(moved);
    }
    p.out = out.get(), p.workspace = align(space.get());
    int at = 0;
    const double us = graph_us([&](cudaStream_t stream) {
      p.stream = stream, p.experts = choices[at++ % 20].get();
      CUDA_OK(moe_experts_fwd(p));
    });
    const double bytes = c.used_experts() * 3 * shape.inner * shape.width *
                         (kind == 0   ? 2
                          : kind == 1 ? 1
                                      : 0.53125),
                 flops = 6. * double(shape.tokens * shape.k) * shape.width * shape.inner;
    std::printf("%-12s T %5ld (%3.0f experts) %-5s %8.1f us  %.2f TB/s  %4.0f TF\n", name, long(shape.tokens),
                c.used_experts(),
                kind == 0   ? "bf16"
                : kind == 1 ? "int8"
                            : "mxfp4",
                us, bytes / us / 1e6, flops / us / 1e6);
    if (kind > 0 && shape.width % 512 != 0) time_parts(shape, p);
  }
}

void time_linear(int64_t rows, int64_t in, int64_t out) {
  std::vector<LinearCase> cases;
  const int sets = int(std::max<int64_t>(1, std::min<int64_t>(20, (int64_t{200} << 20) / (in * out))));
  for (int i = 0; i < sets; ++i) cases.emplace_back(rows, in, out);
  const Buffer<uint16_t> y(rows * out), unpacked(in * out);
  int at = 0;
  const double us = graph_us([&](cudaStream_t stream) {
    LinearRowsParams p = cases[at++ % sets].params(y.get());
    p.stream = stream;
    CUDA_OK(linear_rows(p));
  });
  const double unpack = graph_us([&](cudaStream_t stream) {
    UnpackInt8Params p = cases[at++ % sets].unpacking(unpacked.get());
    p.stream = stream;
    CUDA_OK(unpack_int8(p));
  });
  std::printf("linear rows %4ld in %5ld out %6ld  %7.2f us  %.2f TB/s  %4.0f TF | unpacking %.2f us\n",
              long(rows), long(in), long(out), us, double(in * out) / us / 1e6,
              2. * double(rows) * double(in * out) / us / 1e6, unpack);
}

// What a KDA layer of mini takes from its input.
void time_each(int64_t rows, bool int8) {
  std::vector<LinearCase> cases;
  for (int i = 0; i < 20; ++i) {
    for (const int64_t out : {768, 768, 768, 768, 128, 6}) cases.emplace_back(rows, 768, out);
  }
  const Buffer<uint16_t> y(rows * 768);
  int at = 0;
  const double us = graph_us([&](cudaStream_t stream) {
    const LinearCase* c = &cases[at++ % 20 * 6];
    LinearRowsParams p = c->params(y.get());
    p.count = 6, p.int8 = int8, p.stream = stream;
    for (int i = 0; i < 6; ++i) {
      p.out[i] = c[i].out, p.scale[i] = c[i].scale.get(), p.y[i] = y.get();
      p.w[i] = int8 ? static_cast<const void*>(c[i].w.get()) : c[i].values.get();
    }
    CUDA_OK(linear_rows(p));
  });
  std::printf("each of six, %s rows %2ld  %.2f us\n", int8 ? "int8" : "bf16", long(rows), us);
}

void check_all_experts(bool int8) {
  for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 257})
    check_experts({tokens, 2, 6, 128, 192, {4.f, 25.f}}, Spread::kOne, int(tokens), int8);
  check_experts({300, 16, 896, 384, 192, {4.f, 25.f}}, Spread::kRandom, 4, int8);
  check_experts({900, 4, 20, 96, 32, {0.f, 0.f}}, Spread::kSkewed, 3, int8);
  check_experts({32, 16, 896, 384, 192, {4.f, 25.f}}, Spread::kSkewed, 5, int8);
  check_experts({9, 4, 16, 3584, 1056, {4.f, 0.f}}, Spread::kRandom, 6, int8);
  check_experts({700, 2, 3, 1056, 672, {4.f, 25.f}}, Spread::kRandom, 7, int8);
  if (int8) check_experts({33, 3, 8, 80, 112, {4.f, 25.f}}, Spread::kRandom, 8, int8);
  check_neighbours(int8);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string what = argv[i];
    if (what == "experts") check_all_experts(true), check_all_experts(false);
    if (what == "linear") {
      for (const int64_t rows : {1, 7, 8, 9, 16, 17, 33, 64, 65, 128}) check_linear(rows, 768, 1160);
      check_linear(3, 16, 8), check_linear(5, 2304, 40), check_linear(2, 528, 4096);
      check_each(true), check_each(false);
      CUDA_OK(linear_rows({}));
    }
    if (what == "time") {
      for (const int64_t tokens : {1, 4, 32, 256, 2048, 8192})
        time_experts({tokens, 16, 896, 384, 192, {4.f, 25.f}}, "mini");
      for (const int64_t tokens : {1, 32, 128, 8192})
        time_experts({tokens, 8, 256, 2304, 1024, {0.f, 0.f}}, "kimi-linear");
      for (const bool int8 : {false, true}) {
        for (const int64_t rows : {1, 8, 16, 32}) time_each(rows, int8);
      }
      for (const int64_t rows : {1, 8, 32, 64}) {
        for (const auto& [in, out] : {std::pair{768, 768}, {768, 33024}, {2304, 4096}, {2304, 163840}})
          time_linear(rows, in, out);
      }
    }
    if (what == "small") {
      check_experts({40, 2, 6, 144, 208, {4.f, 25.f}}, Spread::kSkewed, 1, true);
      check_experts({40, 2, 6, 160, 96, {4.f, 25.f}}, Spread::kSkewed, 1, false);
      check_linear(9, 80, 24);
    }
  }
  std::printf("%s\n", failures == 0 ? "ok" : "FAILED");
  return failures != 0;
}
