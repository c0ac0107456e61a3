// Times the router, AttnRes, GLU, norm and loss kernels beside a device copy: milliseconds (median of 20),
// the time that their bytes take at the copy's rate, and the share of it. Standalone: layer_gpu_bench
// [router|mix|glu|norm|loss]...
#include <algorithm>
#include <tuple>

#include "godwit/kernels/layer_gpu.h"
#include "godwit/kernels/moe_gpu.h"
#include "tests/cuda/gpu_values.cuh"

using namespace godwit::kernels::cuda;

namespace {

float median_ms(const std::function<void()>& f) {
  std::vector<float> times;
  cudaEvent_t a, b;
  CUDA_OK(cudaEventCreate(&a));
  CUDA_OK(cudaEventCreate(&b));
  for (int i = 0; i < 23; ++i) {
    CUDA_OK(cudaEventRecord(a));
    f();
    CUDA_OK(cudaEventRecord(b));
    CUDA_OK(cudaEventSynchronize(b));
    float ms;
    CUDA_OK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 3) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Rates {
  double copy;  // bytes a millisecond, read + write
  void row(const char* what, double bytes, const std::function<int()>& f) const {
    const float ms = median_ms([&] { CUDA_OK(f()); });
    std::printf("| %s | %.4f | %.4f | %.2f |\n", what, ms, bytes / copy, bytes / copy / ms);
  }
};

void bench_router(const Rates& rates) {
  const int64_t T = 65536;
  const int E = 896, k = 16, bins = 1000;
  const Buffer<float> logits(floats(size_t(T) * E, 1.5f)), bias(floats(E, 0.05f)), weights(T * k),
      scores(T * E), cutoff(T), d(floats(T * k)), d_logits(T * E);
  const Buffer<int32_t> chosen(T * k);
  const Buffer<int64_t> counts(size_t(E) * bins);
  RouterParams p{.logits = logits.get(),
                 .bias = bias.get(),
                 .tokens = T,
                 .experts = E,
                 .k = k,
                 .chosen = chosen.get(),
                 .weights = weights.get(),
                 .cutoff = cutoff.get()};
  const double once = 4.0 * T * E;
  HistogramParams h{.scores = logits.get(),
                    .from_logits = true,
                    .cutoff = cutoff.get(),
                    .tokens = T,
                    .experts = E,
                    .bins = bins,
                    .range_min = -1.1f,
                    .bins_per_unit = bins / 2.2f,
                    .counts = counts.get()};
  rates.row("router, choices and weights", once, [&] { return moe_router_fwd(p); });
  rates.row("router, histogram (from logits)", once, [&] {
    const int e = moe_router_fwd(p);
    return e ? e : qb_histogram(h);
  });
  rates.row("histogram alone (from logits)", once, [&] { return qb_histogram(h); });
  p.scores = scores.get(), h.scores = scores.get(), h.from_logits = false;
  rates.row("router with scores", 2 * once, [&] { return moe_router_fwd(p); });
  rates.row("router with scores, histogram", 2 * once, [&] {
    const int e = moe_router_fwd(p);
    return e ? e : qb_histogram(h);
  });
  rates.row("histogram alone", once, [&] { return qb_histogram(h); });
  rates.row("router backward", once, [&] {
    return moe_router_bwd({d.get(), logits.get(), chosen.get(), d_logits.get(), T, E, k, true, 1.f});
  });
}

void bench_mix(const Rates& rates) {
  for (int S : {2, 5, 9}) {
    const int64_t T = 8192;
    const int D = 7168;
    const Weights norm(D, true), query(D, true);
    const Bits bits = halves(size_t(T) * D);
    std::vector<Buffer<uint16_t>> v, d_v;
    MixParams p;
    for (int s = 0; s < S; ++s) {
      v.emplace_back(bits), d_v.emplace_back(bits.size());
      p.v[s] = v[s].get(), p.d_v[s] = d_v[s].get();
    }
    const Buffer<uint16_t> out(bits.size()), d_out(bits);
    const Buffer<float> d_norm(D), d_query(D);
    p.sources = S, p.tokens = T, p.width = D, p.norm_weight = norm.view, p.query = query.view, p.eps = 1e-5f;
    p.out = out.get(), p.d_out = d_out.get(), p.d_norm_weight = {d_norm.get(), false},
    p.d_query = {d_query.get(), false};
    const Buffer<uint8_t> space(attn_res_mix_bwd_workspace_bytes(p));
    p.workspace = space.get();
    const double each = 2.0 * T * D;
    rates.row(("mix, " + std::to_string(S) + " sources").c_str(), (S + 1) * each,
              [&] { return attn_res_mix_fwd(p); });
    rates.row(("mix backward, " + std::to_string(S) + " sources").c_str(), (2 * S + 1) * each,
              [&] { return attn_res_mix_bwd(p); });
  }
}

void bench_glu(const Rates& rates) {
  const int64_t n = int64_t{8192} * 33792;
  const Bits bits = halves(n);
  const Buffer<uint16_t> g(bits), u(bits), d(bits), out(n), dg(n), du(n);
  for (auto [name, gate, up] : {std::tuple("SiTU-GLU", 4.f, 25.f), std::tuple("SwiGLU", 0.f, 0.f)}) {
    const GluParams p{n, gate, up, g.get(), u.get(), out.get(), d.get(), dg.get(), du.get()};
    rates.row(name, 6.0 * n, [&] { return glu_fwd(p); });
    rates.row((std::string(name) + " backward").c_str(), 10.0 * n, [&] { return glu_bwd(p); });
  }
}

void bench_norm(const Rates& rates) {
  for (auto [R, D, gated] :
       {std::tuple(int64_t{8192}, 7168, false), std::tuple(int64_t{8192}, 3584, false),
        std::tuple(int64_t{8192}, 512, false), std::tuple(int64_t{8192 * 96}, 128, true)}) {
    const size_t n = size_t(R) * D;
    const Bits all = halves(n);
    const Weights w(D, false);
    const Buffer<uint16_t> x(all), gate(all), dy(all), y(n), dx(n), dgate(n);
    const Buffer<float> dw(D);
    NormParams p{.x = x.get(),
                 .gate = gated ? gate.get() : nullptr,
                 .weight = w.view,
                 .rows = R,
                 .width = D,
                 .eps = 1e-5f,
                 .y = y.get(),
                 .dy = dy.get(),
                 .dx = dx.get(),
                 .dgate = dgate.get(),
                 .dweight = {dw.get(), false}};
    const Buffer<uint8_t> space(rms_norm_bwd_workspace_bytes(p));
    p.workspace = space.get();
    const std::string name =
        std::string(gated ? "gated " : "") + "RMS norm, " + std::to_string(R) + " x " + std::to_string(D);
    rates.row(name.c_str(), (gated ? 6.0 : 4.0) * n, [&] { return rms_norm_fwd(p); });
    rates.row((name + " backward").c_str(), (gated ? 10.0 : 6.0) * n, [&] { return rms_norm_bwd(p); });
  }
}

void bench_loss(const Rates& rates) {
  const int64_t R = 1024;
  const int V = 163840;
  const Floats x = floats(size_t(R) * V);
  const Buffer<float> logits(x), weights(Floats(R, 1.f)), nll(R);
  const Buffer<int64_t> targets(std::vector<int64_t>(R, 77));
  const Buffer<uint16_t> d(x.size());
  const SoftmaxLossParams p{logits.get(), targets.get(), weights.get(), R, V, nll.get(), d.get()};
  SoftmaxLossParams forward = p;
  forward.d_logits = nullptr;
  rates.row("cross-entropy, 1,024 x 163,840", 4.0 * x.size(), [&] { return softmax_loss(forward); });
  rates.row("cross-entropy with gradient", 6.0 * x.size(), [&] { return softmax_loss(p); });
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::vector<std::string> parts(argv + 1, argv + argc);
  if (parts.empty()) parts = {"router", "mix", "glu", "norm", "loss"};
  const Buffer<uint8_t> from(size_t{1} << 31), to(size_t{1} << 31);
  const Rates rates{2.0 * from.count / median_ms([&] {
                      CUDA_OK(cudaMemcpyAsync(to.get(), from.get(), from.count, cudaMemcpyDeviceToDevice));
                    })};
  std::printf("copy %.2f TB/s\n\n| work | ms | floor | share of floor |\n|---|---|---|---|\n",
              rates.copy / 1e9);
  for (const std::string& part : parts) {
    if (part == "router") bench_router(rates);
    if (part == "mix") bench_mix(rates);
    if (part == "glu") bench_glu(rates);
    if (part == "norm") bench_norm(rates);
    if (part == "loss") bench_loss(rates);
  }
}
