// Checks the experts' kernels on a GPU against fp64 sums and against properties that must hold bit for bit,
// and times them. Standalone: experts_gpu_test
// [fwd|bwd|mxfp4|time|time_bwd|time_kimi_linear|time_few|time_mxfp4|small]...; prints one line a case and
// exits 1 if any failed. `small` is one short case of everything, for compute-sanitizer.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "godwit/kernels/cuda/sm90/experts_launch.cuh"
#include "godwit/kernels/cuda/sm90/packed_rows.h"
#include "godwit/kernels/moe_experts_cuda.h"
#include "tests/cuda/experts_case.cuh"

using namespace godwit::kernels;
using namespace godwit::kernels::cuda;

namespace {

// bf16 operands and a rounded inner activation, fp32 sums.
constexpr double kLimit = 6e-3;

void check_forward(const ExpertCase& c) {
  const int64_t T = c.shape.tokens, L = c.shape.width;
  const std::vector<uint16_t> got = run_forward(c, 0, T);
  const double error = relative_error(got, c.reference(false).out);
  std::printf("fwd %-44s %.2e\n", c.name.c_str(), error);
  expect(error < kLimit, c.name + " forward error");
  expect(run_forward(c, 0, T) == got, c.name + " not deterministic");
  for (const int64_t count : {int64_t(1), int64_t(5), T / 2}) {
    if (count == 0 || count >= T) continue;
    const int64_t from = T - count;
    const std::vector<uint16_t> alone = run_forward(c, from, count);
    expect(std::equal(alone.begin(), alone.end(), got.begin() + from * L),
           c.name + " differs in a batch of " + std::to_string(count));
  }
}

struct Gradients {
  std::vector<uint16_t> z, w1, w3, w2;
  std::vector<float> weights;
  bool operator==(const Gradients&) const = default;
};

MoeBackwardParams backward(const ExpertCase& c) {
  const MoeForwardParams f = c.forward(0, c.shape.tokens);
  MoeBackwardParams p;
  p.shape = f.shape, p.w = f.w, p.z = f.z, p.experts = f.experts, p.weights = f.weights,
  p.d_out = c.d_out.get();
  return p;
}

// kept: with the forward's products, not computed again.
Gradients run_backward(const ExpertCase& c, bool kept = false) {
  const MoeShape& s = c.shape;
  const int64_t all = s.experts * s.inner * s.width;
  const Buffer<uint16_t> z(s.tokens * s.width), w1(all), w3(all), w2(all);
  const Buffer<float> weights(s.tokens * s.k);
  MoeBackwardParams p = backward(c);
  p.d_z = z.get(), p.d_w1 = w1.get(), p.d_w3 = w3.get(), p.d_w2 = w2.get(), p.d_weights = weights.get();
  const Buffer<uint8_t> space(moe_experts_bwd_workspace_bytes(s) + 256);
  p.workspace = align(space.get());
  const Buffer<uint8_t> saved(kept ? moe_experts_saved_bytes(s) + 256 : 1);
  if (kept) {
    MoeForwardParams f = c.forward(0, s.tokens);
    const Buffer<uint16_t> out(s.tokens * s.width);
    const Buffer<uint8_t> forward_space(moe_experts_fwd_workspace_bytes(s) + 256);
    f.out = out.get(), f.saved = align(saved.get()), f.workspace = align(forward_space.get());
    CUDA_OK(moe_experts_fwd(f));
    CUDA_OK(cudaDeviceSynchronize());
    expect(out.take() == run_forward(c, 0, s.tokens), c.name + " forward that keeps its products differs");
    p.saved = f.saved;
  }
  CUDA_OK(moe_experts_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  return {z.take(), w1.take(), w3.take(), w2.take(), weights.take()};
}

// One more rounded product deep than the forward. A slot's weight has a gradient that is one dot product, of
// random signs here, so of a few slots it may cancel.
constexpr double kGradLimit = 8e-3, kWeightLimit = 3e-2;

void check_backward(const ExpertCase& c) {
  const Gradients got = run_backward(c);
  const Reference want = c.reference(true);
  const double errors[] = {relative_error(got.z, want.d_z), relative_error(got.weights, want.d_weights),
                           relative_error(got.w1, want.dw1), relative_error(got.w3, want.dw3),
                           relative_error(got.w2, want.dw2)};
  std::printf("bwd %-44s z %.2e p %.2e w1 %.2e w3 %.2e w2 %.2e\n", c.name.c_str(), errors[0], errors[1],
              errors[2], errors[3], errors[4]);
  for (int i = 0; i < 5; ++i)
    expect(errors[i] < (i == 1 ? kWeightLimit : kGradLimit), c.name + " gradient error");
  expect(run_backward(c) == got, c.name + " gradients not deterministic");
  expect(run_backward(c, /*kept=*/true) == got, c.name + " gradients from kept products differ");
}

double median_ms(const std::function<void()>& f, int repeat = 15) {
  std::vector<float> times;
  for (int i = 0; i < repeat + 3; ++i) {
    cudaEvent_t a, b;
    cudaEventCreate(&a), cudaEventCreate(&b);
    cudaEventRecord(a), f(), cudaEventRecord(b), cudaEventSynchronize(b);
    float ms = 0;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 3) times.push_back(ms);
    cudaEventDestroy(a), cudaEventDestroy(b);
  }
  CUDA_OK(cudaGetLastError());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void time_forward(int64_t tokens, int64_t k, int64_t experts, Spread spread) {
  const ExpertCase c("time", {tokens, k, experts, 3584, 3072, {4.f, 25.f}}, spread, 1);
  const MoeShape& s = c.shape;
  const double rows = tokens * k, first = rows * 2 * s.width * 2 * s.inner,
               second = rows * 2 * s.inner * s.width;
  const double used = c.used_experts(), w1 = used * 4 * s.inner * s.width, w2 = used * 2 * s.inner * s.width;
  MoeForwardParams p = c.forward(0, tokens);
  Buffer<uint8_t> space(moe_experts_fwd_workspace_bytes(s) + 256);
  Buffer<uint16_t> out(tokens * s.width);
  p.out = out.get(), p.workspace = align(space.get());
  const double all = median_ms([&] { CUDA_OK(moe_experts_fwd(p)); });
  sm90::ExpertPlan plan;
  char* at = static_cast<char*>(p.workspace);
  at += sm90::layout_plan(s, at, &plan);
  void* x = at;
  void* h = at + (plan.max_rows * s.width * 2 + 255) / 256 * 256;
  const double plan_ms =
      median_ms([&] { CUDA_OK(sm90::launch_plan(plan, p.experts, int(s.experts), nullptr)); });
  const double gather =
      median_ms([&] { CUDA_OK(sm90::launch_gather(plan, p.z, int(k), int(s.width), x, nullptr)); });
  const double glu = median_ms([&] {
    CUDA_OK(sm90::launch_glu_product(plan, s, {p.w.w1, p.w.w3, x, h}, nullptr));
  });
  const double y = median_ms([&] { CUDA_OK(sm90::launch_out_product(plan, s, p.w.w2, h, x, nullptr)); });
  const double combine =
      median_ms([&] { CUDA_OK(sm90::launch_combine(plan, x, p.weights, s, p.out, nullptr)); });
  std::printf(
      "rows %6.0f experts %3ld (%3.0f used): glu %.3f ms %4.0f TF %.2f TB/s | out %.3f ms %4.0f TF %.2f TB/s "
      "| both %4.0f TF %.2f TB/s | "
      "plan %.3f gather %.3f combine %.3f all %.3f ms\n",
      rows, long(experts), used, glu, first / glu / 1e9, w1 / glu / 1e9, y, second / y / 1e9, w2 / y / 1e9,
      (first + second) / (glu + y) / 1e9, (w1 + w2) / (glu + y) / 1e9, plan_ms, gather, combine, all);
}

// Each kernel of the backward from kept products, and the whole.
void time_backward(const MoeShape& s) {
  const ExpertCase c("time", s, Spread::kRandom, 1);
  const int64_t all = s.experts * s.inner * s.width;
  MoeBackwardParams p = backward(c);
  const Buffer<uint8_t> space(moe_experts_bwd_workspace_bytes(s) + 256);
  const Buffer<uint16_t> z(s.tokens * s.width), w1(all), w3(all), w2(all);
  const Buffer<float> weights(s.tokens * s.k);
  p.d_z = z.get(), p.d_w1 = w1.get(), p.d_w3 = w3.get(), p.d_w2 = w2.get(), p.d_weights = weights.get();
  p.workspace = align(space.get());
  const Buffer<uint8_t> saved(moe_experts_saved_bytes(s) + 256);
  MoeForwardParams f = c.forward(0, s.tokens);
  f.out = z.get(), f.workspace = p.workspace;  // the backward's is larger
  const double forward = median_ms([&] { CUDA_OK(moe_experts_fwd(f)); }, 7);
  const double again = median_ms([&] { CUDA_OK(moe_experts_bwd(p)); }, 7);
  f.saved = align(saved.get());
  const double keeping = median_ms([&] { CUDA_OK(moe_experts_fwd(f)); }, 7);
  p.saved = f.saved;
  const double from_kept = median_ms([&] { CUDA_OK(moe_experts_bwd(p)); }, 7);

  sm90::ExpertPlan plan;
  const Buffer<uint8_t> plan_space(sm90::layout_plan(s, nullptr, &plan) + 256);
  sm90::layout_plan(s, align(plan_space.get()), &plan);
  CUDA_OK(sm90::launch_plan(plan, p.experts, int(s.experts), nullptr));
  const int width = int(s.width), inner = int(s.inner), experts = int(s.experts);
  const auto rows = [&](int64_t columns) { return Buffer<uint16_t>(plan.max_rows * columns); };
  const Buffer<uint16_t> x = rows(width), d = rows(width), pair = rows(2 * inner), act = rows(inner);
  const double gather =
      median_ms([&] { CUDA_OK(sm90::launch_gather(plan, p.z, int(s.k), width, x.get(), nullptr)); });
  CUDA_OK(sm90::launch_gather(plan, p.d_out, int(s.k), width, d.get(), nullptr));
  const double da = median_ms([&] {
    CUDA_OK(sm90::launch_transposed_product(plan, experts, {p.w.w2, nullptr, width, inner}, d.get(),
                                            act.get(), nullptr));
  });
  const double glu = median_ms([&] {
    CUDA_OK(sm90::launch_glu_gradient(plan, s,
                                      {.gate_up = p.saved,
                                       .weights = p.weights,
                                       .d_gate_up = pair.get(),
                                       .act = act.get(),
                                       .d_weights = p.d_weights},
                                      nullptr));
  });
  const sm90::Rows x_rows{x.get(), width, width}, d_rows{d.get(), width, width},
      act_rows{act.get(), inner, inner}, gate_rows{pair.get(), inner, 2 * inner};
  const double dw2 = median_ms(
      [&] { CUDA_OK(sm90::launch_weight_gradient(plan, experts, d_rows, act_rows, p.d_w2, nullptr)); });
  const double dw1 = median_ms(
      [&] { CUDA_OK(sm90::launch_weight_gradient(plan, experts, gate_rows, x_rows, p.d_w1, nullptr)); });
  const double dx = median_ms([&] {
    CUDA_OK(sm90::launch_transposed_product(plan, experts, {p.w.w1, p.w.w3, inner, width}, pair.get(),
                                            d.get(), nullptr));
  });
  const double combine =
      median_ms([&] { CUDA_OK(sm90::launch_combine(plan, d.get(), nullptr, s, p.d_z, nullptr)); });
  const double third =
      4. * double(s.tokens * s.k) * s.width * s.inner / 2e9;  // one product of a weight, GFLOP
  const auto rate = [&](double ms, double products) { return products * third / ms; };
  std::printf(
      "rows %6ld, %ld experts, %ld x %ld: forward %.3f ms, keeping the products %.3f; backward %.3f, from "
      "kept "
      "products %.3f (%4.0f TF)\n  gather %.3f | da %.3f ms %4.0f TF | glu %.3f | dw2 %.3f ms %4.0f TF | dw1 "
      "%.3f "
      "ms "
      "%4.0f TF | dx %.3f ms %4.0f TF | combine %.3f\n",
      long(s.tokens * s.k), long(s.experts), long(s.width), long(s.inner), forward, keeping, again, from_kept,
      rate(from_kept, 6), gather, da, rate(da, 1), glu, dw2, rate(dw2, 1), dw1, rate(dw1, 1), dx, rate(dx, 2),
      combine);
}
void time_packed(int64_t tokens, int64_t k, int64_t experts) {
  ExpertCase c("time", {tokens, k, experts, 3584, 3072, {4.f, 25.f}}, Spread::kRandom, 1);
  c.pack(/*keep_values=*/false);
  const MoeShape& s = c.shape;
  MoeForwardParams p = c.forward(0, tokens);
  const Buffer<uint8_t> space(moe_experts_fwd_workspace_bytes(s) + 256);
  const Buffer<uint16_t> out(tokens * s.width);
  p.out = out.get(), p.workspace = align(space.get());
  const double all = median_ms([&] { CUDA_OK(moe_experts_fwd(p)); });
  sm90::ExpertPlan plan;
  plan.tile_rows = sm90::packed_tile_rows();
  char* at = static_cast<char*>(p.workspace);
  at += sm90::layout_plan(s, at, &plan);
  void* x = at;
  void* h = at + (plan.max_rows * s.width * 2 + 255) / 256 * 256;
  const double glu =
      median_ms([&] { CUDA_OK(sm90::launch_packed_glu_product(plan, s, p.w, x, h, nullptr)); });
  const double y = median_ms([&] { CUDA_OK(sm90::launch_packed_out_product(plan, s, p.w, h, x, nullptr)); });
  const double both = median_ms([&] {
    CUDA_OK(sm90::launch_packed_glu_product(plan, s, p.w, x, h, nullptr));
    CUDA_OK(sm90::launch_packed_out_product(plan, s, p.w, h, x, nullptr));
  });
  // The kernels for any width (packed_rows.h) beside it.
  sm90::ExpertPlan small;
  small.tile_rows = sm90::packed_rows_tile(s);
  const Buffer<uint8_t> small_space(sm90::layout_plan(s, nullptr, &small) + 256);
  sm90::layout_plan(s, align(small_space.get()), &small);
  CUDA_OK(sm90::launch_plan(small, p.experts, int(s.experts), nullptr));
  const double any_width = median_ms([&] {
    CUDA_OK(sm90::launch_packed_rows_glu(small, s, p.w, p.z, h, nullptr));
    CUDA_OK(sm90::launch_packed_rows_out(small, s, p.w, h, x, nullptr));
  });
  const double bytes = c.used_experts() * s.inner * s.width * 0.53125,
               flops = 6. * double(tokens * k) * s.width * s.inner;
  std::printf(
      "mxfp4 rows %6ld (%3.0f experts): glu %.3f ms %.2f TB/s | out %.3f ms %.2f TB/s | both %.4f ms %.2f "
      "TB/s "
      "%4.0f TF | all %.3f ms | any width %.4f ms\n",
      long(tokens * k), c.used_experts(), glu, 2 * bytes / glu / 1e9, y, bytes / y / 1e9, both,
      3 * bytes / both / 1e9, flops / both / 1e9, all, any_width);
}

ExpertCase packed(const MoeShape& shape, Spread spread, int seed) {
  ExpertCase c("", shape, spread, seed);
  c.pack();
  return c;
}

void check_all() {
  for (const Spread spread : {Spread::kRandom, Spread::kOne, Spread::kSkewed}) {
    for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 257}) {
      check_forward({"", {tokens, 2, 6, 128, 192, {4.f, 25.f}}, spread, int(tokens)});
    }
  }
  check_forward({"", {3000, 8, 24, 256, 384, {4.f, 25.f}}, Spread::kRandom, 2});
  check_forward({"", {900, 4, 20, 72, 40, {0.f, 0.f}}, Spread::kSkewed, 3});  // widths that fill no tile
  check_forward({"", {300, 16, 896, 264, 136, {4.f, 0.f}}, Spread::kRandom, 4});
  check_forward({"", {700, 2, 3, 1024, 640, {4.f, 25.f}}, Spread::kRandom, 5});
  check_forward({"", {33, 4, 16, 3584, 3072, {4.f, 25.f}}, Spread::kRandom, 6});
}

void check_gradients() {
  for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 257}) {
    check_backward({"", {tokens, 2, 6, 128, 192, {4.f, 25.f}}, Spread::kOne, int(tokens)});
  }
  check_backward({"", {900, 4, 12, 256, 384, {4.f, 25.f}}, Spread::kRandom, 2});
  check_backward({"", {500, 4, 10, 72, 40, {0.f, 0.f}}, Spread::kSkewed, 3});
  check_backward({"", {100, 8, 64, 264, 136, {4.f, 0.f}}, Spread::kRandom, 4});
  check_backward({"", {700, 2, 3, 520, 640, {4.f, 25.f}}, Spread::kSkewed, 5});
}

void check_packed() {
  for (const int64_t tokens : {1, 15, 17, 64, 257}) {
    check_forward(packed({tokens, 2, 6, 512, 512, {4.f, 25.f}}, Spread::kOne, int(tokens)));
  }
  check_forward(packed({700, 8, 24, 512, 1024, {4.f, 25.f}}, Spread::kRandom, 2));
  check_forward(packed({300, 4, 20, 1536, 512, {0.f, 0.f}}, Spread::kSkewed, 3));
  check_forward(packed({33, 4, 16, 3584, 3072, {4.f, 25.f}}, Spread::kRandom, 6));
  for (const int64_t tokens : {1, 2, 16})  // the kernel for few tokens: runs of pieces that end in mid-expert
    check_forward(packed({tokens, 16, 40, 3584, 3072, {4.f, 25.f}}, Spread::kRandom, 7));
}

void time_all() {
  for (int i = 0; i < 2; ++i) {
    time_forward(2048, 16, 112, Spread::kRandom);
    time_forward(64, 16, 112, Spread::kRandom);
  }
  for (const int64_t tokens : {4096, 1024, 512, 256, 1}) time_forward(tokens, 16, 112, Spread::kRandom);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string what = argv[i];
    if (what == "fwd") check_all();
    if (what == "bwd") check_gradients();
    if (what == "mxfp4") check_packed();
    if (what == "time") time_all();
    if (what == "time_kimi_linear") time_backward({8192, 8, 256, 2304, 1024, {0.f, 0.f}});
    if (what == "time_bwd") {
      for (const int64_t tokens : {2048, 4096, 1024})
        time_backward({tokens, 16, 112, 3584, 3072, {4.f, 25.f}});
    }
    if (what == "time_few")
      for (const int64_t tokens : {1, 2, 4, 16}) time_packed(tokens, 16, 112);
    if (what == "time_mxfp4")
      for (const int64_t tokens : {1, 2, 4, 16, 64, 256, 2048}) time_packed(tokens, 16, 112);
    if (what == "small") {
      check_forward({"small", {40, 2, 6, 136, 200, {4.f, 25.f}}, Spread::kSkewed, 1});
      check_backward({"small", {40, 2, 6, 136, 200, {4.f, 25.f}}, Spread::kSkewed, 1});
      check_forward(packed({40, 2, 6, 512, 512, {4.f, 25.f}}, Spread::kSkewed, 1));
    }
  }
  std::printf("%s\n", failures == 0 ? "ok" : "FAILED");
  return failures != 0;
}
