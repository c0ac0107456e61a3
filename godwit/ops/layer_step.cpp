#include "godwit/ops/layer_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "godwit/base/parallel.h"
#include "godwit/kernels/attn_res_mix.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/gemm.h"
#include "godwit/kernels/glu.h"
#include "godwit/kernels/kda.h"
#include "godwit/kernels/mla_decode.h"
#include "godwit/kernels/moe_experts.h"
#include "godwit/kernels/moe_router.h"
#include "godwit/kernels/norm.h"
#include "godwit/kernels/short_conv.h"

namespace godwit::ops {
namespace {

using kernels::Gemm;
using kernels::Scratch;

const float* floats(const Tensor& t) {
  return t.const_data_ptr<float>();
}

// Rows of floats, `stride` apart.
struct Rows {
  float* data = nullptr;
  int64_t stride = 0;
  float* operator[](int64_t row) const { return data + row * stride; }
};

struct ConstRows {
  const float* data = nullptr;
  int64_t stride = 0;
  ConstRows(const float* p, int64_t s) : data(p), stride(s) {}
  ConstRows(const Rows& rows) : data(rows.data), stride(rows.stride) {}  // NOLINT: a view
};

// y = x w^T
Gemm product(const ConstRows& x, int64_t count, const Matrix& w, const Rows& y) {
  Gemm g{.m = count,
         .n = w.size(0),
         .depth = w.size(1),
         .a = {.data = x.data, .stride = x.stride},
         .b = {.data = nullptr, .stride = w.size(1), .transposed = true},
         .c = y.data,
         .c_stride = y.stride};
  if (w.packed()) {
    g.b_int8 = w.const_data_ptr<int8_t>();
    g.b_scale = floats(w.scale);
  } else {
    g.b.data = floats(w);
  }
  return g;
}

void multiply(std::initializer_list<Gemm> products) {
  kernels::gemm_group(products.begin(), static_cast<int64_t>(products.size()));
}

void norm_rows(const ConstRows& x, int64_t count, int64_t width, const Tensor& weight, double eps, float* y) {
  kernels::rms_norm_forward({.rows = count,
                             .width = width,
                             .x = x.data,
                             .x_stride = x.stride,
                             .weight = floats(weight),
                             .eps = static_cast<float>(eps)},
                            y);
}

// [first, last) of rows with the same slot.
struct Run {
  int64_t first, last;
};

std::vector<Run> runs_of(const int64_t* slots, int64_t count) {
  std::vector<Run> runs;
  for (int64_t t = 0; t < count; ++t) {
    if (t == 0 || slots[t] != slots[t - 1]) runs.push_back({t, t});
    runs.back().last = t + 1;
  }
  return runs;
}

// The recurrent part of a KDA layer. `inputs` [T, 4C + H]: q | k | v | z | b as projected; `gate` and y [T,
// C], or null to advance the states alone.
void advance_kda(const KdaLayerStep& l, const ConstRows& inputs, int64_t count, const float* gate, float* y) {
  const int64_t H = l.heads, K = l.head_dim, C = H * K, W = l.q_conv.size(1);
  const auto* slots = l.slots.const_data_ptr<int64_t>();
  const std::vector<Run> runs = runs_of(slots, count);
  const Scratch convolved(count * 3 * C), outputs(count * C);
  const struct {
    const float* weight;
    float* state;
  } conv[3] = {{floats(l.q_conv), l.conv_q.data_ptr<float>()},
               {floats(l.k_conv), l.conv_k.data_ptr<float>()},
               {floats(l.v_conv), l.conv_v.data_ptr<float>()}};
  auto* recurrent = l.recurrent.data_ptr<float>();
  const auto head_step = [&](int64_t t, int64_t h) {
    const float* in = inputs.data + t * inputs.stride;
    float* qkv = convolved.data() + t * 3 * C + h * K;
    const int64_t slot = slots[t];
    for (int64_t i = 0; i < 3; ++i) {
      kernels::short_conv_step(K, W, in + i * C + h * K, conv[i].weight + h * K * W,
                               conv[i].state + (slot * C + h * K) * (W - 1), qkv + i * C);
    }
    float* o = outputs.data() + t * C + h * K;
    kernels::kda_step({.in = {.heads = 1,
                              .key = K,
                              .value = K,
                              .q = qkv,
                              .k = qkv + C,
                              .v = qkv + 2 * C,
                              .z = in + 3 * C + h * K,
                              .b = in + 4 * C + h,
                              .A_log = floats(l.A_log) + h,
                              .dt_bias = floats(l.dt_bias) + h * K,
                              .gate_bound = static_cast<float>(l.gate_bound)},
                       .count = 1,
                       .state = recurrent + (slot * H + h) * K * K,
                       .o = o});
    if (y == nullptr) return;
    kernels::rms_norm_forward({.rows = 1,
                               .width = K,
                               .x = o,
                               .gate = gate + t * C + h * K,
                               .weight = floats(l.o_norm),
                               .eps = static_cast<float>(l.norm_eps)},
                              y + t * C + h * K);
  };
  parallel_for(0, static_cast<int64_t>(runs.size()) * H, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      for (int64_t t = runs[i / H].first; t < runs[i / H].last; ++t) head_step(t, i % H);
    }
  });
}

Tensor rows_like(const Tensor& x, int64_t width) {
  return at::empty({x.size(0), width}, x.options());
}

}  // namespace

bool takes_layer_step(const Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kFloat && x.is_contiguous() && !at::GradMode::is_enabled();
}

Tensor mix_norm_step(const std::vector<Tensor>& sources, const Tensor& norm, const Tensor& query,
                     const Tensor& weight, double eps) {
  const int64_t T = sources[0].size(0), D = sources[0].size(1);
  Tensor y = rows_like(sources[0], D);
  auto* out = y.mutable_data_ptr<float>();
  if (sources.size() == 1) {
    norm_rows({floats(sources[0]), D}, T, D, weight, eps, out);
    return y;
  }
  const Scratch work(D + T * D);
  float *key = work.data(), *mixed = key + D;
  for (int64_t c = 0; c < D; ++c) key[c] = floats(norm)[c] * floats(query)[c];
  const float* rows[64];
  TORCH_CHECK(sources.size() <= std::size(rows), "mix_norm_step: more than 64 sources");
  for (size_t s = 0; s < sources.size(); ++s) rows[s] = floats(sources[s]);
  kernels::attn_res_mix_fwd(T, {.sources = static_cast<int64_t>(sources.size()),
                                .width = D,
                                .eps = static_cast<float>(eps),
                                .v = rows,
                                .key = key,
                                .out = mixed});
  norm_rows({mixed, D}, T, D, weight, eps, out);
  return y;
}

Tensor kda_layer_step(const KdaLayerStep& l, const Tensor& x, Tensor* inputs) {
  const int64_t T = x.size(0), H = l.heads, K = l.head_dim, C = H * K, width = 4 * C + H;
  Tensor kept;
  if (inputs) *inputs = kept = rows_like(x, width);
  const Scratch work((kept.defined() ? 0 : T * width) + T * (2 * K + 2 * C));
  float* free = work.data();
  const auto take = [&](int64_t columns) {
    const Rows rows{free, columns};
    free += T * columns;
    return rows;
  };
  const Rows in = kept.defined() ? Rows{kept.mutable_data_ptr<float>(), width} : take(width);
  const auto part = [&](int64_t column) { return Rows{in.data + column, width}; };
  const Rows f = take(K), low = take(K), gate = take(C), y = take(C);
  const ConstRows from(floats(x), x.size(1));
  multiply({product(from, T, *l.q, part(0)), product(from, T, *l.k, part(C)),
            product(from, T, *l.v, part(2 * C)), product(from, T, *l.f_a, f),
            product(from, T, *l.b, part(4 * C)), product(from, T, *l.g, l.g_b ? low : gate)});
  if (l.g_b) {
    multiply({product(f, T, *l.f_b, part(3 * C)), product(low, T, *l.g_b, gate)});
  } else {
    multiply({product(f, T, *l.f_b, part(3 * C))});
  }
  advance_kda(l, in, T, gate.data, y.data);
  Tensor out = rows_like(x, l.o->size(0));
  multiply({product(y, T, *l.o, {out.mutable_data_ptr<float>(), out.size(1)})});
  return out;
}

void kda_replay(const KdaLayerStep& layer, const Tensor& inputs) {
  const Tensor rows = inputs.contiguous();
  advance_kda(layer, {floats(rows), rows.size(1)}, rows.size(0), nullptr, nullptr);
}

Tensor mla_layer_step(const MlaLayerStep& l, const Tensor& x) {
  const int64_t T = x.size(0), H = l.heads, head = l.nope + l.rope, R = l.rank, wide = R + l.rope;
  const int64_t q_rank = l.q_a ? l.q_a->size(0) : 0;
  const Scratch work(T * (2 * q_rank + H * (head + wide + R + 3 * l.value) + 2 * wide));
  float* free = work.data();
  const auto take = [&](int64_t columns) {
    const Rows rows{free, columns};
    free += T * columns;
    return rows;
  };
  const Rows q_low = take(q_rank), q_normed = take(q_rank), q = take(H * head), kv = take(wide),
             query = take(H * wide), o_latent = take(H * R), o = take(H * l.value), gate = take(H * l.value),
             gated = take(H * l.value);
  const ConstRows from(floats(x), x.size(1));
  std::vector<Gemm> first = {product(from, T, *l.kv_a, kv),
                             product(from, T, l.q_a ? *l.q_a : *l.q_b, l.q_a ? q_low : q)};
  if (l.g) first.push_back(product(from, T, *l.g, gate));
  kernels::gemm_group(first.data(), static_cast<int64_t>(first.size()));
  if (l.q_a) {
    norm_rows(q_low, T, q_rank, l.q_a_norm, l.norm_eps, q_normed.data);
    multiply({product(q_normed, T, *l.q_b, q)});
  }
  auto* pages = l.pages.data_ptr<float>();
  const auto* place = l.rows.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < T; ++t) {
    float* row = pages + place[t] * wide;
    norm_rows({kv[t], wide}, 1, R, l.kv_a_norm, l.norm_eps, row);
    std::copy(kv[t] + R, kv[t] + wide, row + R);
  }
  // W_UK folded into q, W_UV into the output: kv_b is [H, nope + value, R].
  const float* kv_b = floats(*l.kv_b);
  std::vector<Gemm> fold, unfold;
  for (int64_t h = 0; h < H; ++h) {
    const float* keys = kv_b + h * (l.nope + l.value) * R;
    fold.push_back({.m = T,
                    .n = R,
                    .depth = l.nope,
                    .a = {.data = q.data + h * head, .stride = q.stride},
                    .b = {.data = keys, .stride = R},
                    .c = query.data + h * wide,
                    .c_stride = query.stride});
    unfold.push_back({.m = T,
                      .n = l.value,
                      .depth = R,
                      .a = {.data = o_latent.data + h * R, .stride = o_latent.stride},
                      .b = {.data = keys + l.nope * R, .stride = R, .transposed = true},
                      .c = o.data + h * l.value,
                      .c_stride = o.stride});
    for (int64_t t = 0; t < T; ++t) {
      const float* pe = q[t] + h * head + l.nope;
      std::copy(pe, pe + l.rope, query[t] + h * wide + R);
    }
  }
  kernels::gemm_group(fold.data(), H);
  kernels::mla_decode({.sequences = T,
                       .heads = H,
                       .width = wide,
                       .rank = R,
                       .q = query.data,
                       .pages = pages,
                       .page_rows = l.pages.size(1),
                       .page_stride = l.pages.stride(0),
                       .row_stride = l.pages.stride(1),
                       .table = l.table.const_data_ptr<int32_t>(),
                       .table_stride = l.table.stride(0),
                       .lengths = l.lengths.const_data_ptr<int64_t>(),
                       .window = l.window,
                       .scale = static_cast<float>(l.scale),
                       .o = o_latent.data});
  kernels::gemm_group(unfold.data(), H);
  if (l.g) kernels::sigmoid_gate_fwd(T * H * l.value, o.data, gate.data, gated.data);
  Tensor out = rows_like(x, l.o->size(0));
  multiply({product(l.g ? gated : o, T, *l.o, {out.mutable_data_ptr<float>(), out.size(1)})});
  return out;
}

Tensor mlp_layer_step(const MlpLayerStep& l, const Tensor& x) {
  const int64_t T = x.size(0), I = l.gate->size(0);
  const Scratch work(3 * T * I);
  const Rows g{work.data(), I}, u{g.data + T * I, I}, a{u.data + T * I, I};
  const ConstRows from(floats(x), x.size(1));
  multiply({product(from, T, *l.gate, g), product(from, T, *l.up, u)});
  kernels::glu_fwd(T * I, g.data, u.data, {static_cast<float>(l.beta_gate), static_cast<float>(l.beta_up)},
                   a.data);
  Tensor out = rows_like(x, l.down->size(0));
  multiply({product(a, T, *l.down, {out.mutable_data_ptr<float>(), out.size(1)})});
  return out;
}

namespace {

kernels::MoeFormat format_of(const Matrix& w) {
  switch (w.scalar_type()) {
    case at::kChar:
      return kernels::MoeFormat::kInt8;
    case at::kByte:
      return kernels::MoeFormat::kMxfp4;
    default:
      return kernels::MoeFormat::kFp32;
  }
}

// Routed experts of z [T, L] by the router's logits [T, E].
void routed_experts(const MoeLayerStep& l, const float* z, const float* logits, int64_t count, int64_t width,
                    float* out) {
  const int64_t E = l.w1->size(0), k = l.k;
  const Scratch work(count * (2 * k + 1));
  float *weights = work.data(), *cutoff = weights + count * k;
  auto* chosen = reinterpret_cast<int32_t*>(cutoff + count);
  kernels::moe_router_fwd(count, {.form = {.experts = E,
                                           .k = k,
                                           .renormalize = l.renormalize,
                                           .scale = static_cast<float>(l.scale),
                                           .groups = l.groups,
                                           .topk_groups = l.topk_groups},
                                  .logits = logits,
                                  .bias = floats(l.router_bias),
                                  .chosen = chosen,
                                  .weights = weights,
                                  .cutoff = cutoff});
  kernels::MoePlan plan;
  kernels::make_moe_plan(chosen, count * k, E, &plan);
  const auto scale = [](const Matrix& w) { return w.packed() ? w.scale.const_data_ptr() : nullptr; };
  kernels::moe_experts_fwd(
      {.shape = {.tokens = count,
                 .k = k,
                 .experts = E,
                 .width = width,
                 .inner = l.w1->size(1),
                 .form = {static_cast<float>(l.beta_gate), static_cast<float>(l.beta_up)}},
       .w = {.w1 = l.w1->const_data_ptr(),
             .w3 = l.w3->const_data_ptr(),
             .w2 = l.w2->const_data_ptr(),
             .s1 = scale(*l.w1),
             .s3 = scale(*l.w3),
             .s2 = scale(*l.w2),
             .format = format_of(*l.w1)},
       .z = z,
       .weights = weights,
       .out = out},
      plan);
}

}  // namespace

Tensor moe_layer_step(const MoeLayerStep& l, const Tensor& x) {
  const int64_t T = x.size(0), D = x.size(1), E = l.w1->size(0), L = l.down ? l.down->size(0) : D;
  const int64_t I = l.shared.gate ? l.shared.gate->size(0) : 0;
  const Scratch work(T * (E + 3 * L + 3 * I + 2 * D));
  float* free = work.data();
  const auto take = [&](int64_t columns) {
    const Rows rows{free, columns};
    free += T * columns;
    return rows;
  };
  const Rows logits = take(E), z = take(L), u = take(L), normed = take(L), g = take(I), up = take(I),
             a = take(I), routed = take(D), shared = take(D);
  const ConstRows from(floats(x), D), latent = l.down ? ConstRows(z) : from;
  std::vector<Gemm> first;
  if (l.down) first.push_back(product(from, T, *l.down, z));
  if (!l.router_sees_latent) first.push_back(product(from, T, *l.router, logits));
  if (I > 0) {
    first.push_back(product(from, T, *l.shared.gate, g));
    first.push_back(product(from, T, *l.shared.up, up));
  }
  kernels::gemm_group(first.data(), static_cast<int64_t>(first.size()));
  if (l.router_sees_latent) multiply({product(latent, T, *l.router, logits)});
  routed_experts(l, latent.data, logits.data, T, L, u.data);
  const kernels::GluForm form{static_cast<float>(l.beta_gate), static_cast<float>(l.beta_up)};
  if (I > 0) kernels::glu_fwd(T * I, g.data, up.data, form, a.data);
  if (l.norm.defined()) norm_rows(u, T, L, l.norm, l.norm_eps, normed.data);
  Tensor out = rows_like(x, D);
  auto* y = out.mutable_data_ptr<float>();
  std::vector<Gemm> last;
  if (l.up) last.push_back(product(l.norm.defined() ? normed : u, T, *l.up, routed));
  if (I > 0) last.push_back(product(a, T, *l.shared.down, shared));
  kernels::gemm_group(last.data(), static_cast<int64_t>(last.size()));
  const float* one = l.up ? routed.data : u.data;
  for (int64_t i = 0; i < T * D; ++i) y[i] = I > 0 ? one[i] + shared.data[i] : one[i];
  return out;
}

}  // namespace godwit::ops
