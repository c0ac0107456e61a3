// Checks the KDA kernels on a GPU against the fp64 recurrence and against properties that must hold bit for
// bit. Standalone: kda_gpu_test [fwd|bwd|step|conv|long]...; prints one line a case and exits 1 if any
// failed. `kda_gpu_test small` is one short case of everything, for compute-sanitizer.
#include <algorithm>

#include "godwit/kernels/kda_heuristic.h"
#include "tests/cuda/kda_case.cuh"
#include "tests/cuda/kda_reference.cuh"

using namespace godwit::kernels::cuda;

namespace {

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) ++failures, std::printf("  FAILED: %s\n", what.c_str());
}

struct Forward {
  std::vector<uint16_t> o;
  std::vector<float> final_state;
};

Forward run_forward(const Data& d, const DeviceCase& dev, const int32_t* checkpoint_slot = nullptr,
                    float* checkpoints = nullptr) {
  Buffer<uint16_t> o(d.q.size());
  Buffer<float> final_state(d.c.lengths.size() * d.c.H * 128 * 128);
  KdaChunkFwdParams p;
  p.in = dev.in;
  p.o = o.get(), p.final_state = final_state.get();
  p.checkpoint_slot = checkpoint_slot, p.checkpoints = checkpoints;
  Buffer<uint8_t> workspace(kda_chunk_fwd_workspace_bytes(p.in));
  p.workspace = workspace.get();
  CUDA_OK(kda_chunk_fwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  return {o.take(), final_state.take()};
}

// bf16 operands with fp32 sums: 2^-9 a product, a few products deep. Inputs whose errors cancel badly get
// more.
constexpr double kOutputLimit = 8e-3, kStateLimit = 8e-3;

void check_forward(const Case& c, int seed) {
  const Data d = draw(c, seed);
  const DeviceCase dev(d);
  const Forward got = run_forward(d, dev);
  Buffer<double> o(d.q.size()), final_state(got.final_state.size());
  reference::forward<<<dim3(dev.in.N, dev.in.H), 128>>>(dev.in, {o.get(), final_state.get(), nullptr});
  CUDA_OK(cudaDeviceSynchronize());
  const double eo = relative_error(got.o, o.take()), es = relative_error(got.final_state, final_state.take());
  std::printf("fwd %-28s T %6ld N %2d H %2d  o %.2e  state %.2e\n", c.name.c_str(), long(d.T), dev.in.N, c.H,
              eo, es);
  expect(eo < kOutputLimit && es < kStateLimit, c.name + " forward error");
  const Forward again = run_forward(d, dev);
  expect(again.o == got.o && again.final_state == got.final_state, c.name + " not deterministic");
}

// Token t changes: nothing before t may change a bit.
void check_causal(const Case& c, int seed) {
  Data d = draw(c, seed);
  const Forward base = run_forward(d, DeviceCase(d));
  const size_t row = size_t(c.H) * 128;
  for (int64_t t : {int64_t(0), int64_t(5), int64_t(16), d.T / 2 + 3, d.T - 1}) {
    if (t < 0 || t >= d.T) continue;
    Data changed = d;
    for (size_t i = 0; i < row; ++i) {
      changed.q[t * row + i] ^= 0x80, changed.k[t * row + i] ^= 0x8081, changed.v[t * row + i] ^= 0x8100,
          changed.z[t * row + i] ^= 0x8000;
    }
    const Forward got = run_forward(changed, DeviceCase(changed));
    expect(std::memcmp(got.o.data(), base.o.data(), t * row * 2) == 0,
           c.name + " token " + std::to_string(t) + " leaks back");
    expect(std::memcmp(got.o.data() + t * row, base.o.data() + t * row, row * 2) != 0,
           c.name + " change has no effect");
  }
}

Data slice(const Data& d, int n) {
  Data s = d;
  const int64_t begin = d.cu[n], end = d.cu[n + 1], row = int64_t(d.c.H) * 128;
  const auto cut = [&](std::vector<uint16_t>& x, int64_t width) {
    x = std::vector<uint16_t>(x.begin() + begin * width, x.begin() + end * width);
  };
  cut(s.q, row), cut(s.k, row), cut(s.v, row), cut(s.z, row), cut(s.d_o, row), cut(s.b, d.c.H);
  s.b_wide = std::vector<float>(d.b_wide.begin() + begin * d.c.H, d.b_wide.begin() + end * d.c.H);
  s.T = end - begin, s.cu = {0, s.T}, s.c.lengths = {int(s.T)};
  const int64_t state = row * 128;
  if (d.c.initial) {
    s.initial = std::vector<float>(d.initial.begin() + n * state, d.initial.begin() + (n + 1) * state);
    s.d_final = std::vector<float>(d.d_final.begin() + n * state, d.d_final.begin() + (n + 1) * state);
  }
  return s;
}

// Each sequence alone gives the bits it gives in the batch.
void check_batch(const Case& c, int seed) {
  const Data d = draw(c, seed);
  const Forward all = run_forward(d, DeviceCase(d));
  const size_t row = size_t(c.H) * 128, state = row * 128;
  for (int n = 0; n < int(c.lengths.size()); ++n) {
    const Data one = slice(d, n);
    const Forward alone = run_forward(one, DeviceCase(one));
    const bool same =
        std::memcmp(alone.o.data(), all.o.data() + d.cu[n] * row, alone.o.size() * 2) == 0 &&
        std::memcmp(alone.final_state.data(), all.final_state.data() + n * state, state * 4) == 0;
    expect(same, c.name + " sequence " + std::to_string(n) + " differs alone");
  }
}

// A sequence fed in two pieces with the state carried agrees with the whole: bit for bit where the cut is a
// chunk's and nothing else is cut into segments, within rounding elsewhere.
void check_split(const Case& c, int seed) {
  const Data d = draw(c, seed);
  const Forward whole = run_forward(d, DeviceCase(d));
  const size_t row = size_t(c.H) * 128;
  for (int64_t at : {int64_t(1), int64_t(16), d.T / 2, d.T / 32 * 16, d.T - 1}) {
    Data both = d;
    both.cu = {0, at, d.T};
    both.c.lengths = {int(at), int(d.T - at)};
    both.initial.resize(2 * row * 128), both.d_final.resize(2 * row * 128);
    Data first = slice(both, 0), second = slice(both, 1);
    const Forward a = run_forward(first, DeviceCase(first));
    second.initial = a.final_state;
    const Forward b = run_forward(second, DeviceCase(second));
    std::vector<uint16_t> joined = a.o;
    joined.insert(joined.end(), b.o.begin(), b.o.end());
    std::vector<double> want;
    for (uint16_t x : whole.o) want.push_back(bf16_value(x));
    const double eo = relative_error(joined, want),
                 es = relative_error(b.final_state,
                                     std::vector<double>(whole.final_state.begin(), whole.final_state.end()));
    expect(eo < kOutputLimit && es < kStateLimit, c.name + " split at " + std::to_string(at));
    if (at % 16 == 0 && kda_segment_length(d.T, c.H) >= d.T)
      expect(joined == whole.o && b.final_state == whole.final_state,
             c.name + " split at a chunk differs, " + std::to_string(at));
  }
}

// The state after chunk c is the final state of the prefix (uncut sequences).
void check_checkpoints(const Case& c, int seed) {
  const Data d = draw(c, seed);
  std::vector<int32_t> slots(kda_unit_count(d.T, c.lengths.size(), 16), -1);
  slots[kda_first_unit(0, 0, 16)] = 1, slots[kda_first_unit(0, 0, 16) + 3] = 0;
  const Buffer<int32_t> device_slots(slots);
  const size_t state = size_t(c.H) * 128 * 128;
  const Buffer<float> checkpoints(2 * state);
  run_forward(d, DeviceCase(d), device_slots.get(), checkpoints.get());
  const std::vector<float> got = checkpoints.take();
  for (int i = 0; i < 2; ++i) {
    Data prefix = slice(d, 0);
    prefix.cu[1] = i == 0 ? 64 : 16;
    prefix = slice(prefix, 0);
    const Forward f = run_forward(prefix, DeviceCase(prefix));
    expect(std::memcmp(f.final_state.data(), got.data() + i * state, state * 4) == 0,
           c.name + " checkpoint " + std::to_string(i));
  }
}

struct Backward {
  std::vector<uint16_t> dq, dk, dv, dz;
  std::vector<float> db, dA_log, d_dt_bias, d_initial;
  bool operator==(const Backward&) const = default;
};

Backward run_backward(const Data& d, const DeviceCase& dev) {
  const size_t wide = d.q.size(), states = d.c.lengths.size() * d.c.H * 128 * 128;
  Buffer<uint16_t> dq(wide), dk(wide), dv(wide), dz(wide);
  Buffer<float> db(d.b.size()), dA(d.c.H), dt(d.c.H * 128), initial(states);
  KdaChunkBwdParams p;
  p.in = dev.in;
  p.d_o = dev.d_o.get(), p.d_final_state = d.c.initial ? dev.d_final.get() : nullptr;
  p.dq = dq.get(), p.dk = dk.get(), p.dv = dv.get(), p.dz = dz.get(), p.db = db.get();
  p.dA_log = dA.get(), p.d_dt_bias = dt.get(), p.d_initial_state = initial.get();
  Buffer<uint8_t> workspace(kda_chunk_bwd_workspace_bytes(p.in));
  p.workspace = workspace.get();
  CUDA_OK(kda_chunk_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  return {dq.take(), dk.take(), dv.take(), dz.take(), db.take(), dA.take(), dt.take(), initial.take()};
}

// Gradients pass through more bf16 roundings than outputs; dz, dA_log and dt_bias are differences of large
// terms.
constexpr double kGradientLimit = 2e-2;

void check_backward(const Case& c, int seed) {
  const Data d = draw(c, seed);
  const DeviceCase dev(d);
  const Backward got = run_backward(d, dev);
  const size_t wide = d.q.size(), states = got.d_initial.size();
  Buffer<double> o(wide), final_state(states), history(wide * 128);
  reference::forward<<<dim3(dev.in.N, dev.in.H), 128>>>(dev.in, {o.get(), final_state.get(), history.get()});
  Buffer<double> dq(wide), dk(wide), dv(wide), dz(wide), db(d.b.size()), dA(c.H), dt(c.H * 128),
      initial(states);
  dA.zero(), dt.zero();
  reference::backward<<<dim3(dev.in.N, dev.in.H), 128>>>(
      dev.in, dev.d_o.get(), c.initial ? dev.d_final.get() : nullptr, history.get(),
      {dq.get(), dk.get(), dv.get(), dz.get(), db.get(), dA.get(), dt.get(), initial.get()});
  CUDA_OK(cudaDeviceSynchronize());
  const double e[8] = {
      relative_error(got.dq, dq.take()),        relative_error(got.dk, dk.take()),
      relative_error(got.dv, dv.take()),        relative_error(got.dz, dz.take()),
      relative_error(got.db, db.take()),        relative_error(got.dA_log, dA.take()),
      relative_error(got.d_dt_bias, dt.take()), relative_error(got.d_initial, initial.take())};
  std::printf("bwd %-22s q %.1e k %.1e v %.1e z %.1e b %.1e A %.1e dt %.1e S %.1e\n", c.name.c_str(), e[0],
              e[1], e[2], e[3], e[4], e[5], e[6], e[7]);
  for (int i = 0; i < 8; ++i) {
    // With equal keys and beta near 1 every token overwrites the same direction: what is left of the initial
    // state's gradient is a small difference of terms that are each rounded to bf16.
    const bool forgotten = i == 7 && c.kind == "equal_keys";
    // An unbounded gate that alternates between "keep" and "forget all" has gate gradients of 1e-7 and less
    // of the other gradients: they drown in the fp32 rounding of the sum over later tokens. They must be
    // finite.
    const bool drowned = (i == 3 || i == 5 || i == 6) && c.kind == "gate_mixed" && c.bound == 0.f;
    // dA_log sums one number a head over all tokens and channels, terms of both signs that mostly cancel.
    const double limit = forgotten ? 0.3 : drowned ? 1e3 : i == 5 ? 3 * kGradientLimit : kGradientLimit;
    expect(e[i] < limit, c.name + " gradient error");
  }
  expect(run_backward(d, dev) == got, c.name + " gradients not deterministic");
}

// Per-token gradients of a sequence alone and in the batch, bit for bit.
void check_backward_batch(const Case& c, int seed) {
  const Data d = draw(c, seed);
  const Backward all = run_backward(d, DeviceCase(d));
  const size_t row = size_t(c.H) * 128;
  for (int n = 0; n < int(c.lengths.size()); ++n) {
    const Data one = slice(d, n);
    const Backward alone = run_backward(one, DeviceCase(one));
    const auto same = [&](const auto& x, const auto& y, size_t width) {
      return std::memcmp(x.data(), y.data() + d.cu[n] * width, x.size() * sizeof(x[0])) == 0;
    };
    expect(same(alone.dq, all.dq, row) && same(alone.dk, all.dk, row) && same(alone.dv, all.dv, row) &&
               same(alone.dz, all.dz, row) && same(alone.db, all.db, c.H),
           c.name + " gradients of sequence " + std::to_string(n) + " differ alone");
  }
}

void backward_tests() {
  for (const char* kind : {"random", "gate_low", "gate_high", "gate_mixed", "equal_keys", "norm30",
                           "zero_norm", "beta_low", "beta_high"})
    check_backward({kind, {150}, 2, kind}, 21);
  check_backward({"bite", {0, 1, 15, 16, 17, 63, 64, 65, 257, 0}, 2}, 22);
  check_backward({"bite no initial", {0, 1, 15, 16, 17, 63, 0}, 2, "random", false}, 23);
  for (const char* kind : {"random", "gate_low", "gate_high", "gate_mixed"})
    check_backward({std::string("softplus ") + kind, {17, 100}, 2, kind, true, 0.f}, 24);
  check_backward({"fp32 beta", {17, 100}, 2, "random", true, -5.f, true}, 26);
  check_backward_batch({"batch", {0, 1, 15, 16, 17, 63, 64, 65, 0}, 2}, 25);
}

// One step of a layer for one sequence and head in fp64. conv [3][128][3] and S [128][128] are updated.
std::vector<double> step_reference(const std::vector<double>& x, const std::vector<double>& z, double b,
                                   const std::vector<double>& gate, const std::vector<float>& w,
                                   const std::vector<float>& dt, const std::vector<float>& norm, double A,
                                   float bound, std::vector<double>& conv, std::vector<double>& S) {
  std::vector<double> y(384), o(128), e(128);
  for (int i = 0; i < 384; ++i) {
    const double full[4] = {conv[i * 3], conv[i * 3 + 1], conv[i * 3 + 2], x[i]};
    double sum = 0;
    for (int j = 0; j < 4; ++j) sum += w[i * 4 + j] * full[j];
    for (int j = 0; j < 3; ++j) conv[i * 3 + j] = full[j + 1];
    y[i] = bf16_value(bf16_bits(float(sum / (1 + std::exp(-sum)))));
  }
  double qq = 1e-6, kk = 1e-6;
  for (int i = 0; i < 128; ++i) qq += y[i] * y[i], kk += y[128 + i] * y[128 + i];
  for (int v = 0; v < 128; ++v) e[v] = y[256 + v];
  const double beta = 1 / (1 + std::exp(-b));
  for (int k = 0; k < 128; ++k) {
    const double logit = z[k] + dt[k];
    const double g =
        bound < 0 ? bound / (1 + std::exp(-std::exp(A) * logit)) : -std::exp(A) * std::log1p(std::exp(logit));
    for (int v = 0; v < 128; ++v)
      S[k * 128 + v] *= std::exp(g), e[v] -= S[k * 128 + v] * y[128 + k] / std::sqrt(kk);
  }
  double square = 0;
  for (int k = 0; k < 128; ++k)
    for (int v = 0; v < 128; ++v) {
      S[k * 128 + v] += beta * y[128 + k] / std::sqrt(kk) * e[v];
      o[v] += S[k * 128 + v] * y[k] / std::sqrt(qq * 128);
    }
  for (double value : o) square += value * value;
  for (int v = 0; v < 128; ++v) o[v] *= norm[v] / std::sqrt(square / 128 + 1e-5) / (1 + std::exp(-gate[v]));
  return o;
}

// `steps` calls of `tokens` tokens each, of which the states keep `keep` (a verifier's rejected drafts are
// computed and forgotten).
void check_step(float bound, int tokens, int keep) {
  const int B = 4, H = 3, slots = 5, steps = 4, rows = B * tokens;
  const std::vector<int32_t> slot = {3, -1, 0, 4}, kept(B, keep);
  std::mt19937 rng(31);
  std::normal_distribution<float> normal;
  const auto floats = [&](size_t n, float size, float middle = 0) {
    std::vector<float> x(n);
    for (float& y : x) y = middle + size * normal(rng);
    return x;
  };
  const auto halves = [&](size_t n) {
    std::vector<uint16_t> x(n);
    for (uint16_t& y : x) y = bf16_bits(normal(rng));
    return x;
  };
  const std::vector<float> w = floats(3 * H * 128 * 4, 0.5f), A = floats(H, 0.3f),
                           dt = floats(H * 128, 0.5f, -2), norm = floats(128, 0.2f, 1);
  std::vector<float> state = floats(size_t(slots) * H * 16384, 0.3f);
  std::vector<uint16_t> conv = halves(size_t(slots) * 3 * H * 128 * 3);
  for (int i = 0; i < H * 16384; ++i)
    state[size_t(1) * H * 16384 + i] = NAN;  // slots 1 and 2 belong to nobody
  std::vector<double> S(state.begin(), state.end()), C;
  for (uint16_t x : conv) C.push_back(bf16_value(x));
  const Buffer<float> dw(w), dA(A), ddt(dt), dnorm(norm), dstate(state);
  const Buffer<uint16_t> dconv(conv);
  const Buffer<int32_t> dslot(slot), dkept(kept);
  double worst = 0;
  for (int step = 0; step < steps; ++step) {
    const std::vector<uint16_t> x = halves(size_t(rows) * 3 * H * 128), z = halves(size_t(rows) * H * 128),
                                b = halves(rows * H), gate = halves(size_t(rows) * H * 128);
    const Buffer<uint16_t> dx(x), dz(z), db(b), dgate(gate), y(size_t(rows) * H * 128);
    KdaStepParams p;
    for (int i = 0; i < 3; ++i) {
      p.x[i] = dx.get() + i * H * 128, p.conv_weight[i] = dw.get() + i * H * 512;
      p.conv_state[i] = dconv.get() + i * H * 384;
    }
    p.x_stride = 3 * H * 128, p.conv_stride = 3 * H * 384;
    p.z = dz.get(), p.b = db.get(), p.gate = dgate.get();
    p.A_log = dA.get(), p.dt_bias = ddt.get(), p.norm_weight = dnorm.get();
    p.slot = dslot.get(), p.keep = keep == tokens ? nullptr : dkept.get();
    p.state = dstate.get(), p.y = y.get();
    p.B = B, p.H = H, p.tokens = tokens, p.gate_bound = bound;
    CUDA_OK(kda_step(p));
    CUDA_OK(cudaDeviceSynchronize());
    const std::vector<uint16_t> got = y.take();
    std::vector<double> want(got.size(), 0.0);
    for (int i = 0; i < B; ++i)
      for (int h = 0; h < H && slot[i] >= 0; ++h) {
        std::vector<double> sx(384), sz(128), sg(128), sc(1152),
            sS(S.begin() + (size_t(slot[i]) * H + h) * 16384,
               S.begin() + (size_t(slot[i]) * H + h + 1) * 16384);
        std::vector<float> sw(1536), sdt(dt.begin() + h * 128, dt.begin() + (h + 1) * 128);
        const auto channel = [&](int c) { return size_t(c / 128) * H * 128 + h * 128 + c % 128; };
        for (int c = 0; c < 384; ++c) {
          for (int j = 0; j < 4; ++j) sw[c * 4 + j] = w[channel(c) * 4 + j];
          for (int j = 0; j < 3; ++j) sc[c * 3 + j] = C[(size_t(slot[i]) * 3 * H * 128 + channel(c)) * 3 + j];
        }
        for (int m = 0; m < tokens; ++m) {
          const size_t row = size_t(i) * tokens + m;
          for (int c = 0; c < 384; ++c) sx[c] = bf16_value(x[row * 3 * H * 128 + channel(c)]);
          for (int c = 0; c < 128; ++c)
            sz[c] = bf16_value(z[(row * H + h) * 128 + c]), sg[c] = bf16_value(gate[(row * H + h) * 128 + c]);
          const std::vector<double> o =
              step_reference(sx, sz, bf16_value(b[row * H + h]), sg, sw, sdt, norm, A[h], bound, sc, sS);
          std::copy(o.begin(), o.end(), want.begin() + (row * H + h) * 128);
          if (m + 1 != keep) continue;
          std::copy(sS.begin(), sS.end(), S.begin() + (size_t(slot[i]) * H + h) * 16384);
          for (int c = 0; c < 384; ++c)
            for (int j = 0; j < 3; ++j)
              C[(size_t(slot[i]) * 3 * H * 128 + channel(c)) * 3 + j] = sc[c * 3 + j];
        }
      }
    worst = std::max(worst, relative_error(got, want));
  }
  const std::vector<uint16_t> conv_after = dconv.take();
  for (size_t i = 0; i < conv_after.size(); ++i)
    if (bf16_value(conv_after[i]) != C[i]) {
      expect(false, "step convolution state");
      break;
    }
  const std::vector<float> after = dstate.take();
  double diff = 0, size = 0;
  for (size_t i = 0; i < after.size(); ++i) {
    const size_t owner = i / (size_t(H) * 16384);
    if (owner == 1 || owner == 2) {
      expect(std::memcmp(&after[i], &state[i], 4) == 0, "step touched a slot of nobody");
      if (std::memcmp(&after[i], &state[i], 4) != 0) break;
    } else {
      diff += (after[i] - S[i]) * (after[i] - S[i]), size += S[i] * S[i];
    }
  }
  std::printf("step bound %.0f tokens %d kept %d  y %.2e  state %.2e\n", bound, tokens, keep, worst,
              std::sqrt(diff / size));
  // y is rounded to bf16; q, k, v are rounded to bf16 in both, so the state is nearly fp32-exact (a rounding
  // that falls the other way is rare).
  expect(worst < 5e-3 && std::sqrt(diff / size) < 1e-3, "step error");
}

// A captured step replayed with other slots in the same memory gives the bits of a call with those slots.
void check_step_graph(bool bf16_state) {
  const int B = 3, H = 2, slots = 5;
  std::mt19937 rng(33);
  std::normal_distribution<float> normal;
  const auto halves = [&](size_t n) {
    std::vector<uint16_t> x(n);
    for (uint16_t& y : x) y = bf16_bits(normal(rng));
    return x;
  };
  const std::vector<uint16_t> start = halves(size_t(slots) * H * 16384 * (bf16_state ? 1 : 2));
  const std::vector<uint16_t> x = halves(size_t(B) * H * 128 * 4), b = halves(B * H);
  const Buffer<uint16_t> dx(x), db(b);
  Buffer<uint16_t> y(size_t(B) * H * 128), state(start);
  const Buffer<float> A(std::vector<float>(H, 0.1f)), dt(std::vector<float>(H * 128, -1.f));
  Buffer<int32_t> slot(std::vector<int32_t>{0, 1, 2});
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  KdaStepParams p;
  for (int i = 0; i < 3; ++i) p.x[i] = dx.get() + size_t(i) * B * H * 128;
  p.x_stride = H * 128, p.z = dx.get() + size_t(3) * B * H * 128, p.b = db.get();
  p.A_log = A.get(), p.dt_bias = dt.get(), p.slot = slot.get();
  p.state = state.get(), p.state_bf16 = bf16_state, p.y = y.get(), p.B = B, p.H = H, p.stream = stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  CUDA_OK(kda_step(p));
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (const std::vector<int32_t>& now : {std::vector<int32_t>{0, 1, 2}, {4, -1, 3}, {-1, 2, 0}}) {
    slot.put(now);
    std::vector<uint16_t> outputs[2], states[2];
    for (int replayed = 0; replayed < 2; ++replayed) {
      state.put(start), y.zero();
      CUDA_OK(cudaDeviceSynchronize());
      CUDA_OK(replayed ? int(cudaGraphLaunch(replay, stream)) : kda_step(p));
      CUDA_OK(cudaDeviceSynchronize());
      outputs[replayed] = y.take(), states[replayed] = state.take();
    }
    expect(outputs[0] == outputs[1] && states[0] == states[1], "step graph replayed with other slots");
    for (int i = 0; i < slots; ++i) {
      const size_t size = start.size() / slots;
      const bool owned = std::find(now.begin(), now.end(), i) != now.end();
      const bool same =
          std::equal(start.begin() + i * size, start.begin() + (i + 1) * size, states[1].begin() + i * size);
      expect(same != owned, "step graph touched a slot of nobody, or not its own");
    }
  }
  std::printf("step graph%s\n", bf16_state ? ", bf16 state" : "");
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

// Short convolution and its gradients against fp64 on the host.
void check_conv() {
  const std::vector<int> lengths = {5, 0, 1, 64, 2, 129, 65};
  const int C = 136, N = int(lengths.size());
  std::vector<int64_t> cu = {0};
  for (int n : lengths) cu.push_back(cu.back() + n);
  const int64_t T = cu.back();
  std::mt19937 rng(41);
  std::normal_distribution<float> normal;
  const auto halves = [&](size_t n) {
    std::vector<uint16_t> x(n);
    for (uint16_t& y : x) y = bf16_bits(normal(rng));
    return x;
  };
  const std::vector<uint16_t> x = halves(T * C), dy = halves(T * C), initial = halves(N * C * 3),
                              d_final = halves(N * C * 3);
  std::vector<float> w(C * 4);
  for (float& y : w) y = 0.5f * normal(rng);
  std::vector<double> y(T * C), dx(T * C, 0.0), dw(C * 4, 0.0), final_state(N * C * 3),
      d_initial(N * C * 3, 0.0);
  for (int n = 0; n < N; ++n)
    for (int c = 0; c < C; ++c) {
      const int length = lengths[n];
      const auto in = [&](int t) -> double {
        return t >= 0 ? bf16_value(x[(cu[n] + t) * C + c]) : bf16_value(initial[(n * C + c) * 3 + 3 + t]);
      };
      const auto d_in = [&](int t) -> double& {
        return t >= 0 ? dx[(cu[n] + t) * C + c] : d_initial[(n * C + c) * 3 + 3 + t];
      };
      for (int t = 0; t < length; ++t) {
        double u = 0;
        for (int j = 0; j < 4; ++j) u += w[c * 4 + j] * in(t - 3 + j);
        const double s = 1 / (1 + std::exp(-u)),
                     du = bf16_value(dy[(cu[n] + t) * C + c]) * s * (1 + u * (1 - s));
        y[(cu[n] + t) * C + c] = u * s;
        for (int j = 0; j < 4; ++j) d_in(t - 3 + j) += w[c * 4 + j] * du, dw[c * 4 + j] += du * in(t - 3 + j);
      }
      for (int j = 0; j < 3; ++j) {
        final_state[(n * C + c) * 3 + j] = in(length - 3 + j);
        d_in(length - 3 + j) += bf16_value(d_final[(n * C + c) * 3 + j]);
      }
    }
  const Buffer<uint16_t> bx(x), bdy(dy), binitial(initial), bd_final(d_final), by(x.size()),
      bfinal(initial.size()), bdx(x.size()), bd_initial(initial.size());
  const Buffer<float> bw(w), bdw(w.size());
  const Buffer<int64_t> bcu(cu);
  ShortConvParams p;
  p.x = bx.get(), p.weight = bw.get(), p.initial_state = binitial.get(), p.cu_seqlens = bcu.get(), p.T = T,
  p.C = C, p.N = N;
  p.y = by.get(), p.final_state = bfinal.get(), p.dy = bdy.get(), p.d_final_state = bd_final.get(),
  p.dx = bdx.get(), p.dweight = bdw.get();
  p.d_initial_state = bd_initial.get();
  const Buffer<uint8_t> workspace(short_conv_bwd_workspace_bytes(p));
  p.workspace = workspace.get();
  CUDA_OK(short_conv_fwd(p));
  CUDA_OK(short_conv_bwd(p));
  CUDA_OK(cudaDeviceSynchronize());
  const double e[5] = {relative_error(by.take(), y), relative_error(bfinal.take(), final_state),
                       relative_error(bdx.take(), dx), relative_error(bdw.take(), dw),
                       relative_error(bd_initial.take(), d_initial)};
  std::printf("conv y %.1e final %.1e dx %.1e dw %.1e d_initial %.1e\n", e[0], e[1], e[2], e[3], e[4]);
  // One rounding to bf16, except the weight's gradient, which is fp32.
  expect(e[0] < 3e-3 && e[1] == 0 && e[2] < 3e-3 && e[3] < 1e-5 && e[4] < 3e-3, "short convolution error");
}

void forward_tests() {
  const std::vector<int> bite = {0, 1, 15, 16, 17, 63, 64, 65, 257, 0};
  for (const char* kind : {"random", "gate_low", "gate_high", "gate_mixed", "equal_keys", "norm30",
                           "zero_norm", "beta_low", "beta_high"})
    check_forward({kind, {300}, 2, kind}, 1);
  check_forward({"bite", bite, 3}, 2);
  check_forward({"bite no initial", bite, 2, "random", false}, 3);
  check_forward({"many heads", {200, 77}, 24}, 4);
  check_forward({"cut", {2500}, 1}, 5);
  check_forward({"cut varlen", {2100, 0, 333, 4096 + 7}, 2}, 6);
  check_forward({"cut gate_low", {2500}, 1, "gate_low"}, 7);
  check_forward({"cut equal_keys", {2500}, 1, "equal_keys", false}, 7);
  // Segments of 1,024 tokens: what enters one is forgotten on the way, at once, or not at all.
  check_forward({"cut forgets", {4200, 100}, 12}, 19);
  check_forward({"cut forgets at once", {4200}, 12, "gate_high"}, 19);
  check_forward({"cut keeps", {4200}, 12, "gate_low"}, 19);
  for (const char* kind : {"random", "gate_low", "gate_high", "gate_mixed"})
    check_forward({std::string("softplus ") + kind, {17, 300}, 2, kind, true, 0.f}, 8);
  check_causal({"causal", {100}, 2}, 9);
  check_causal({"causal cut", {2400}, 1}, 10);
  check_causal({"causal softplus", {100}, 2, "random", true, 0.f}, 11);
  check_causal({"causal softplus steep", {100}, 2, "gate_high", true, 0.f}, 11);
  check_batch({"batch softplus", bite, 2, "gate_high", true, 0.f}, 12);
  check_batch({"batch", bite, 2}, 12);
  check_batch({"batch cut", {2100, 5, 3000}, 1}, 13);
  check_batch({"batch many", std::vector<int>(70, 37), 2}, 13);  // another kernel shape than alone
  check_checkpoints({"checkpoints", {150, 20}, 2}, 14);
  check_split({"split", {150}, 2}, 15);
  check_split({"split cut", {2500}, 1}, 16);
  check_split({"split softplus", {150}, 2, "random", true, 0.f}, 17);
  check_forward({"fp32 beta", {17, 100}, 2, "random", true, -5.f, true}, 18);
}

}  // namespace

int main(int argc, char** argv) {
  const auto wanted = [&](const char* what) {
    bool any = argc < 2;
    for (int i = 1; i < argc; ++i) any |= std::strcmp(argv[i], what) == 0;
    return any;
  };
  if (argc == 2 && std::strcmp(argv[1], "small") == 0) {
    check_forward({"small", {0, 1, 17, 40}, 2}, 51);
    check_forward({"small softplus", {17, 20}, 2, "random", true, 0.f}, 52);
    check_forward({"small cut", {2100}, 1}, 53);
    check_backward({"small", {0, 1, 17, 40}, 2}, 54);
    check_backward({"small softplus", {17, 20}, 2, "random", true, 0.f}, 55);
    check_step(-5.f, 1, 1), check_step(-5.f, 3, 2), check_conv();
  }
  if (argc > 1 && wanted("long")) {  // 262,144 tokens, serially in fp64
    check_forward({"long", {1 << 18}, 1}, 61);
    check_forward({"long gate_low", {1 << 18}, 1, "gate_low"}, 62);
  }
  if (wanted("fwd")) forward_tests();
  if (wanted("bwd")) backward_tests();
  if (wanted("step")) {
    check_step(-5.f, 1, 1), check_step(0.f, 1, 1);
    check_step(-5.f, 4, 4), check_step(-5.f, 4, 2), check_step(-5.f, 4, 0);
    check_step_graph(false), check_step_graph(true);
  }
  if (wanted("conv")) check_conv();
  std::printf(failures ? "%d FAILED\n" : "all passed\n", failures);
  return failures != 0;
}
