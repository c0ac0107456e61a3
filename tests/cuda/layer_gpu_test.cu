// Checks the router, AttnRes, GLU, norm and loss kernels on a GPU against fp64 on the host, and their
// bit-for-bit properties. Standalone: layer_gpu_test [router|mix|glu|norm|loss]...; prints one line a case
// and exits 1 if any failed. `small` is one short case of each, for compute-sanitizer.
#include <algorithm>

#include "godwit/kernels/layer_gpu.h"
#include "godwit/kernels/moe_gpu.h"
#include "tests/cuda/gpu_values.cuh"

using namespace godwit::kernels::cuda;

namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) ++failures, std::printf("  FAILED: %s\n", what.c_str());
}

// ---- router

struct RouterCase {
  int64_t T;
  int E, k;
  std::string kind = "random";
  bool renormalize = true;
};

struct Routed {
  std::vector<int32_t> chosen;
  Floats weights, scores, cutoff;
  bool same_routes(const Routed& o) const {
    return chosen == o.chosen && std::memcmp(weights.data(), o.weights.data(), weights.size() * 4) == 0 &&
           std::memcmp(cutoff.data(), o.cutoff.data(), cutoff.size() * 4) == 0;
  }
};

Floats router_logits(const RouterCase& c) {
  Floats x = floats(size_t(c.T) * c.E, 1.5f);
  for (size_t i = 0; i < x.size(); ++i) {
    const int e = int(i % c.E);
    if (c.kind == "equal") x[i] = 0.25f;
    if (c.kind == "few values") x[i] = float(int(x[i]));
    if (c.kind == "rising") x[i] = float(e) / c.E;
    if (c.kind == "falling") x[i] = -float(e) / c.E;
    if (c.kind == "odd" && i % 5 == 0) x[i] = i % 10 ? NAN : (i % 20 ? INFINITY : -INFINITY);
    if (c.kind == "odd" && i % 7 == 0) x[i] *= 100;
  }
  return x;
}

Routed run_router(const RouterCase& c, const Buffer<float>& logits, const Buffer<float>& bias, bool scores) {
  const size_t n = size_t(c.T) * c.k;
  Buffer<int32_t> chosen(n);
  Buffer<float> weights(n), s(size_t(c.T) * c.E), cutoff(c.T);
  CUDA_OK(moe_router_fwd({.logits = logits.get(),
                          .bias = bias.get(),
                          .tokens = c.T,
                          .experts = c.E,
                          .k = c.k,
                          .renormalize = c.renormalize,
                          .scale = 1.25f,
                          .chosen = chosen.get(),
                          .weights = weights.get(),
                          .scores = scores ? s.get() : nullptr,
                          .cutoff = cutoff.get()}));
  CUDA_OK(cudaDeviceSynchronize());
  return {chosen.take(), weights.take(), s.take(), cutoff.take()};
}

// The gradient in fp64 from the scores that the kernel gave.
void check_router_gradient(const RouterCase& c, const Routed& r, const Buffer<float>& logits) {
  const Floats d = floats(r.weights.size());
  const Buffer<float> d_dev(d), d_logits(r.scores.size());
  const Buffer<int32_t> chosen(r.chosen);
  CUDA_OK(moe_router_bwd({.d_weights = d_dev.get(),
                          .logits = logits.get(),
                          .chosen = chosen.get(),
                          .d_logits = d_logits.get(),
                          .tokens = c.T,
                          .experts = c.E,
                          .k = c.k,
                          .renormalize = c.renormalize,
                          .scale = 1.25f}));
  CUDA_OK(cudaDeviceSynchronize());
  Doubles want(r.scores.size(), 0.0);
  for (int64_t t = 0; t < c.T; ++t) {
    double total = 1e-20, mean = 0;
    const auto s = [&](int i) { return double(r.scores[t * c.E + r.chosen[t * c.k + i]]); };
    for (int i = 0; i < c.k; ++i) total += s(i);
    for (int i = 0; i < c.k; ++i) mean += d[t * c.k + i] * s(i) / total;
    for (int i = 0; i < c.k; ++i) {
      const double ds = 1.25 * (c.renormalize && c.k > 1 ? (d[t * c.k + i] - mean) / total : d[t * c.k + i]);
      want[t * c.E + r.chosen[t * c.k + i]] = ds * s(i) * (1 - s(i));
    }
  }
  const double error = relative_error(d_logits.take(), want);
  expect(error < 1e-5, "router gradient, error " + std::to_string(error));  // fp32 with a few sums
}

void check_histogram(const RouterCase& c, const Routed& r, const Buffer<float>& logits) {
  const int bins = 1000;
  const float low = -1.1f, per_unit = bins / 2.2f;
  const Buffer<float> scores(r.scores), cutoff(r.cutoff);
  std::vector<int64_t> want(size_t(c.E) * bins, 3);
  for (int64_t t = 0; t < c.T; ++t)
    for (int e = 0; e < c.E; ++e) {
      const float place = std::floor((r.cutoff[t] - r.scores[t * c.E + e] - low) * per_unit);
      ++want[size_t(e) * bins + size_t(std::min(std::max(place, 0.f), bins - 1.f))];
    }
  for (bool from_logits : {false, true}) {
    const Buffer<int64_t> counts(std::vector<int64_t>(want.size(), 3));
    CUDA_OK(qb_histogram({.scores = from_logits ? logits.get() : scores.get(),
                          .from_logits = from_logits,
                          .cutoff = cutoff.get(),
                          .tokens = c.T,
                          .experts = c.E,
                          .bins = bins,
                          .range_min = low,
                          .bins_per_unit = per_unit,
                          .counts = counts.get()}));
    CUDA_OK(cudaDeviceSynchronize());
    const std::vector<int64_t> got = counts.take();
    int64_t moved = 0;
    for (size_t i = 0; i < got.size(); ++i) moved += std::abs(got[i] - want[i]);
    // From logits the sigmoid's last bit may carry a value over a bin's edge.
    expect(from_logits ? moved <= c.T * c.E / 1000 : moved == 0, "histogram counts");
  }
}

void check_router(const RouterCase& c) {
  const Buffer<float> logits(router_logits(c)), bias(floats(c.E, c.kind == "equal" ? 0.f : 0.05f));
  const Routed r = run_router(c, logits, bias, true);
  const Floats x = logits.take(), b = bias.take();
  double worst_score = 0, worst_weight = 0;
  bool choices = true, cutoffs = true;
  for (int64_t t = 0; t < c.T; ++t) {
    const float* s = r.scores.data() + t * c.E;
    std::vector<int> order(c.E);
    Floats rank(c.E);
    for (int e = 0; e < c.E; ++e) {
      const double exact = 1 / (1 + std::exp(-double(x[t * c.E + e])));
      if (!std::isnan(exact) && exact > 1e-30)
        worst_score =
            std::max(worst_score, std::abs(s[e] - exact) / exact - 7.5e-8 * std::abs(x[t * c.E + e]));
      order[e] = e, rank[e] = std::isnan(s[e]) ? -INFINITY : s[e] + b[e];
    }
    std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return rank[i] > rank[j]; });
    double total = 0;
    for (int i = 0; i < c.k; ++i) total += s[order[i]];
    for (int i = 0; i < c.k; ++i) {
      choices = choices && r.chosen[t * c.k + i] == order[i];
      const double want = 1.25 * s[order[i]] / (c.renormalize && c.k > 1 ? total + 1e-20 : 1.0);
      if (!std::isnan(want))
        worst_weight = std::max(worst_weight, std::abs(r.weights[t * c.k + i] - want) / (want + 1e-30));
    }
    cutoffs = cutoffs && r.cutoff[t] == (c.k < c.E ? rank[order[c.k]] : -INFINITY);
  }
  std::printf("router %-10s T %6ld E %4d k %2d  score %.1e weight %.1e\n", c.kind.c_str(), long(c.T), c.E,
              c.k, worst_score, worst_weight);
  expect(choices && cutoffs, "router choices or cutoffs");
  // Two units in the last place of the exponential, one of the reciprocal, and the rounding of its argument,
  // which is taken off above; a dozen additions.
  expect(worst_score < 4e-7 && worst_weight < 1e-6, "router values");
  expect(run_router(c, logits, bias, false).same_routes(r), "router without scores differs");
  if (c.kind == "random") check_router_gradient(c, r, logits), check_histogram(c, r, logits);
  if (c.T > 1) {  // the last row alone
    const int64_t last = c.T - 1;
    const Buffer<float> alone(Floats(x.begin() + last * c.E, x.end()));
    const Routed one = run_router({1, c.E, c.k, c.kind, c.renormalize}, alone, bias, true);
    expect(std::equal(one.chosen.begin(), one.chosen.end(), r.chosen.begin() + last * c.k) &&
               std::memcmp(one.weights.data(), r.weights.data() + last * c.k, c.k * 4) == 0,
           "router row alone differs");
  }
}

void router_tests() {
  for (const char* kind : {"random", "equal", "few values", "rising", "falling", "odd"})
    check_router({300, 896, 16, kind});
  for (int64_t T : {1, 15, 16, 17, 257, 5000}) check_router({T, 896, 16});
  for (int E : {4, 8, 60, 128, 132, 256, 512, 900, 1024})
    for (int k : {1, 2, 8, 31})
      if (k <= E) check_router({65, E, k, "random", k != 8});
}

// ---- AttnRes mix

void check_mix(int S, int64_t T, int D, bool bf16, float size = 1) {
  const double eps = 1e-5;
  const size_t n = size_t(T) * D;
  const Weights norm(D, bf16), query(D, bf16, 1 / std::sqrt(float(D)));
  std::vector<Buffer<uint16_t>> v, d_v;
  std::vector<Doubles> x, want_d(S, Doubles(n));
  MixParams p;
  for (int s = 0; s < S; ++s) {
    const Bits bits = halves(n, size * float(s + 1) / S);
    v.emplace_back(bits), d_v.emplace_back(n), x.push_back(wide(bits));
    p.v[s] = v[s].get(), p.d_v[s] = d_v[s].get();
  }
  const Bits d_bits = halves(n);
  const Doubles d = wide(d_bits);
  const Buffer<uint16_t> out(n), d_out(d_bits);
  const Buffer<float> d_norm(D), d_query(D);
  p.sources = S, p.tokens = T, p.width = D, p.norm_weight = norm.view, p.query = query.view,
  p.eps = float(eps);
  p.out = out.get(), p.d_out = d_out.get();
  p.d_norm_weight = {d_norm.get(), false}, p.d_query = {d_query.get(), false};
  const Buffer<uint8_t> space(attn_res_mix_bwd_workspace_bytes(p));
  p.workspace = space.get();
  Doubles want(n, 0.0), d_key(D, 0.0), want_norm(D), want_query(D);
  for (int64_t t = 0; t < T; ++t) {
    Doubles r(S), score(S), a(S), along(S);
    double top = -INFINITY, total = 0, mean = 0;
    for (int s = 0; s < S; ++s) {
      double square = 0;
      for (int c = 0; c < D; ++c) {
        const double y = x[s][t * D + c];
        square += y * y, score[s] += norm.values[c] * query.values[c] * y, along[s] += d[t * D + c] * y;
      }
      r[s] = 1 / std::sqrt(square / D + eps), score[s] *= r[s], top = std::max(top, score[s]);
    }
    for (int s = 0; s < S; ++s) total += a[s] = std::exp(score[s] - top);
    for (int s = 0; s < S; ++s) a[s] /= total, mean += a[s] * along[s];
    for (int s = 0; s < S; ++s) {
      const double ds = a[s] * (along[s] - mean);
      for (int c = 0; c < D; ++c) {
        const double y = x[s][t * D + c], key = norm.values[c] * query.values[c];
        want[t * D + c] += a[s] * y;
        want_d[s][t * D + c] = a[s] * d[t * D + c] + ds * r[s] * (key - r[s] * score[s] / D * y);
        d_key[c] += ds * r[s] * y;
      }
    }
  }
  for (int c = 0; c < D; ++c)
    want_norm[c] = d_key[c] * query.values[c], want_query[c] = d_key[c] * norm.values[c];
  CUDA_OK(attn_res_mix_fwd(p));
  CUDA_OK(attn_res_mix_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  const double e_out = relative_error(out.take(), want), e_norm = relative_error(d_norm.take(), want_norm),
               e_query = relative_error(d_query.take(), want_query);
  double e_v = 0;
  for (int s = 0; s < S; ++s) e_v = std::max(e_v, relative_error(d_v[s].take(), want_d[s]));
  std::printf("mix S %d T %4ld D %4d  out %.1e v %.1e norm %.1e query %.1e\n", S, long(T), D, e_out, e_v,
              e_norm, e_query);
  // One rounding to bf16; the parameters' gradients are sums in fp32. With one source the score has no
  // gradient: all that is left of it is rounding.
  expect(e_out < 3e-3 && e_v < 3e-3 && (S == 1 || (e_norm < 1e-4 && e_query < 1e-4)), "mix error");
  const Bits first = out.take(), first_d = d_v[S - 1].take();
  const Floats first_norm = d_norm.take();
  CUDA_OK(attn_res_mix_fwd(p));
  CUDA_OK(attn_res_mix_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  expect(first == out.take() && first_d == d_v[S - 1].take() && first_norm == d_norm.take(),
         "mix not deterministic");
  MixParams last = p;  // the last token alone
  const Buffer<uint16_t> one(D);
  for (int s = 0; s < S; ++s) last.v[s] = v[s].get() + (T - 1) * D;
  last.tokens = 1, last.out = one.get();
  CUDA_OK(attn_res_mix_fwd(last));
  CUDA_OK(cudaDeviceSynchronize());
  expect(one.take() == Bits(first.end() - D, first.end()), "mix token alone differs");
}

void mix_tests() {
  for (int S : {1, 2, 3, 5, 9}) check_mix(S, 300, 256, S % 2 == 0);
  for (int D : {8, 64, 512, 1048, 2304, 7168}) check_mix(4, 33, D, false);
  check_mix(9, 400, 7168, true);
  check_mix(9, 17, 7168, false, 30);
}

// ---- GLU

void check_glu(float beta_gate, float beta_up, float size) {
  const size_t n = 8 * 999;
  Bits g = halves(n, size), u = halves(n, size);
  for (size_t i = 0; i < 8; ++i)
    g[i] = bf16_bits(i % 2 ? 1e4f : -1e4f), u[i] = bf16_bits(i % 4 < 2 ? 1e4f : -1e4f);
  for (size_t i = 8; i < 16; ++i) g[i] = bf16_bits(1e-6f), u[i] = bf16_bits(-1e-6f);
  const Bits d = halves(n);
  const Doubles gx = wide(g), ux = wide(u), dx = wide(d);
  const Buffer<uint16_t> gd(g), ud(u), dd(d), out(n), dg(n), du(n);
  const GluParams p{.n = int64_t(n),
                    .beta_gate = beta_gate,
                    .beta_up = beta_up,
                    .g = gd.get(),
                    .u = ud.get(),
                    .out = out.get(),
                    .d_out = dd.get(),
                    .d_g = dg.get(),
                    .d_u = du.get()};
  CUDA_OK(glu_fwd(p));
  CUDA_OK(glu_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  const Doubles got[3] = {wide(out.take()), wide(dg.take()), wide(du.take())};
  double worst = 0;
  for (size_t i = 0; i < n; ++i) {
    const double s = 1 / (1 + std::exp(-gx[i]));
    const double t = beta_gate > 0 ? std::tanh(gx[i] / beta_gate) : 0,
                 w = beta_up > 0 ? std::tanh(ux[i] / beta_up) : 0;
    const double act = beta_gate > 0 ? beta_gate * t * s : gx[i] * s, lin = beta_up > 0 ? beta_up * w : ux[i];
    const double slope = (beta_gate > 0 ? (1 - t * t) * s : s) + act * (1 - s),
                 lin_slope = beta_up > 0 ? 1 - w * w : 1;
    const double want[3] = {act * lin, dx[i] * slope * lin, dx[i] * act * lin_slope};
    // Where a slope is a difference (its zero, or 1 - t^2 far out) its error is measured against the terms.
    const double terms[3] = {std::abs(want[0]), std::abs(dx[i] * lin) * (s + std::abs(act * (1 - s))),
                             std::abs(dx[i] * act)};
    for (int j = 0; j < 3; ++j)
      worst =
          std::max(worst, (std::abs(got[j][i] - want[j]) - 1e-6 * terms[j]) / (std::abs(want[j]) + 1e-30));
  }
  std::printf("glu beta %.0f %.0f size %.0e  worst %.1e\n", beta_gate, beta_up, size, worst);
  expect(worst < 4.2e-3, "glu error");  // half a unit of bf16 is 3.9e-3 of the value
}

void glu_tests() {
  for (float size : {1e-3f, 1.f, 30.f})
    for (auto [gate, up] :
         {std::pair(4.f, 25.f), std::pair(0.f, 0.f), std::pair(4.f, 0.f), std::pair(0.f, 1.f)})
      check_glu(gate, up, size);
}

// ---- norms

void check_norm(int64_t R, int D, bool gated, bool bf16) {
  const double eps = 1e-5;
  const size_t n = size_t(R) * D;
  const Weights w(D, bf16);
  const Bits x = halves(n, 3), gate = halves(n), dy = halves(n);
  const Doubles xd = wide(x), gd = wide(gate), dd = wide(dy);
  const Buffer<uint16_t> xb(x), gb(gate), db(dy), y(n), dx(n), dgate(n);
  const Buffer<float> dw(D);
  NormParams p{.x = xb.get(),
               .gate = gated ? gb.get() : nullptr,
               .weight = w.view,
               .rows = R,
               .width = D,
               .eps = float(eps),
               .y = y.get(),
               .dy = db.get(),
               .dx = dx.get(),
               .dgate = dgate.get(),
               .dweight = {dw.get(), false}};
  const Buffer<uint8_t> space(rms_norm_bwd_workspace_bytes(p));
  p.workspace = space.get();
  CUDA_OK(rms_norm_fwd(p));
  CUDA_OK(rms_norm_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  Doubles want(n), want_x(n), want_g(n), want_w(D, 0.0);
  for (int64_t r = 0; r < R; ++r) {
    double square = 0, mean = 0;
    for (int c = 0; c < D; ++c) square += xd[r * D + c] * xd[r * D + c];
    const double inverse = 1 / std::sqrt(square / D + eps);
    const auto open = [&](int c) { return gated ? 1 / (1 + std::exp(-gd[r * D + c])) : 1.0; };
    for (int c = 0; c < D; ++c) mean += dd[r * D + c] * open(c) * w.values[c] * xd[r * D + c] * inverse / D;
    for (int c = 0; c < D; ++c) {
      const size_t i = r * D + c;
      const double s = open(c), hat = xd[i] * inverse;
      want[i] = hat * w.values[c] * s;
      want_x[i] = inverse * (dd[i] * s * w.values[c] - hat * mean);
      want_g[i] = dd[i] * hat * w.values[c] * s * (1 - s);
      want_w[c] += dd[i] * s * hat;
    }
  }
  const double e_y = relative_error(y.take(), want), e_x = relative_error(dx.take(), want_x),
               e_g = gated ? relative_error(dgate.take(), want_g) : 0,
               e_w = relative_error(dw.take(), want_w);
  std::printf("norm R %5ld D %4d%s  y %.1e x %.1e gate %.1e w %.1e\n", long(R), D, gated ? " gated" : "", e_y,
              e_x, e_g, e_w);
  expect(e_y < 3e-3 && e_x < 3e-3 && e_g < 3e-3 && e_w < 1e-5, "norm error");
  const Bits first = y.take(), first_x = dx.take();
  const Floats first_w = dw.take();
  NormParams last = p;
  const Buffer<uint16_t> one(D);
  last.x = xb.get() + (R - 1) * D, last.gate = gated ? gb.get() + (R - 1) * D : nullptr, last.rows = 1,
  last.y = one.get();
  CUDA_OK(rms_norm_fwd(last));
  CUDA_OK(rms_norm_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  expect(one.take() == Bits(first.end() - D, first.end()), "norm row alone differs");
  expect(first_x == dx.take() && first_w == dw.take(), "norm not deterministic");
}

void norm_tests() {
  for (int D : {8, 64, 128, 200, 256, 512, 520, 1536, 3584, 7168, 8192}) {
    check_norm(D == 128 ? 3000 : 257, D, false, D % 3 == 0);
    check_norm(17, D, true, false);
  }
  check_norm(20000, 128, true, false);
  check_norm(1, 7168, false, true);
}

// ---- cross-entropy

void check_loss(int64_t R, int V, bool gradient, float size) {
  const size_t n = size_t(R) * V;
  const Floats x = floats(n, size), weights = floats(R, 0.3f, 1);
  std::vector<int64_t> targets(R);
  for (int64_t r = 0; r < R; ++r) targets[r] = r % 4 == 3 ? -100 : int64_t(generator()() % V);
  if (R > 1) targets[0] = 0, targets[1] = V - 1;
  const Buffer<float> xb(x), wb(weights), nll(R);
  const Buffer<int64_t> tb(targets);
  const Buffer<uint16_t> d(n);
  CUDA_OK(softmax_loss({.logits = xb.get(),
                        .targets = tb.get(),
                        .weights = wb.get(),
                        .rows = R,
                        .vocabulary = V,
                        .nll = nll.get(),
                        .d_logits = gradient ? d.get() : nullptr}));
  CUDA_OK(cudaDeviceSynchronize());
  Doubles want(R, 0.0), want_d(n, 0.0);
  for (int64_t r = 0; r < R; ++r) {
    if (targets[r] < 0) continue;
    double top = -INFINITY, sum = 0;
    for (int c = 0; c < V; ++c) top = std::max(top, double(x[r * V + c]));
    for (int c = 0; c < V; ++c) sum += std::exp(x[r * V + c] - top);
    want[r] = std::log(sum) + top - x[r * V + targets[r]];
    for (int c = 0; c < V; ++c)
      want_d[r * V + c] = weights[r] * (std::exp(x[r * V + c] - top) / sum - (c == targets[r]));
  }
  const double e_nll = relative_error(nll.take(), want),
               e_d = gradient ? relative_error(d.take(), want_d) : 0;
  std::printf("loss R %3ld V %6d size %.0f  nll %.1e d %.1e\n", long(R), V, size, e_nll, e_d);
  expect(e_nll < 2e-6 && e_d < 4e-3, "loss error");  // the gradient is rounded to bf16 once
}

void loss_tests() {
  check_loss(1500, 1000, true, 2), check_loss(600, 8200, true, 2);  // several rows a CTA
  for (int V : {8, 64, 1000, 32768, 41000}) check_loss(41, V, true, 2), check_loss(5, V, false, 30);
  check_loss(70, 163840, true, 2);  // several rows a cluster
  for (int V : {65536, 65600, 163848, 262144, 270000}) check_loss(3, V, true, 2);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> parts(argv + 1, argv + argc);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (parts == std::vector<std::string>{"small"}) {
    check_router({33, 896, 16}), check_router({9, 896, 16, "equal"}), check_router({9, 8, 2});
    check_mix(9, 150, 512, true), check_mix(2, 3, 264, false);
    check_glu(4, 25, 1), check_norm(33, 128, true, false), check_norm(9, 1536, false, true);
    check_loss(5, 1000, true, 2), check_loss(2, 240000, true, 2);
  } else {
    if (parts.empty()) parts = {"router", "mix", "glu", "norm", "loss"};
    for (const std::string& part : parts) {
      if (part == "router") router_tests();
      if (part == "mix") mix_tests();
      if (part == "glu") glu_tests();
      if (part == "norm") norm_tests();
      if (part == "loss") loss_tests();
    }
  }
  std::printf(failures ? "%d FAILED\n" : "all passed\n", failures);
  return failures > 0;
}
