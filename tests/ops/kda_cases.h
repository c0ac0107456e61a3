// Random inputs for the KDA tests, drawn in fp32 so that the fp64 oracle sees exactly the values of the
// kernel.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "godwit/ops/ops.h"
#include "godwit/ops/ref/kda_ref.h"

namespace godwit::test {

struct KdaCase {
  std::vector<int64_t> lengths;
  int64_t heads = 2, key = 32, value = 32;
  double gate_bound = -5.0;  // 0: softplus
  bool initial_state = true;

  int64_t tokens() const {
    int64_t sum = 0;
    for (const int64_t n : lengths) sum += n;
    return sum;
  }
  std::string name() const {
    std::string out = "lengths";
    for (const int64_t n : lengths) out += " " + std::to_string(n);
    return out + ", H " + std::to_string(heads) + ", K " + std::to_string(key) + ", V " +
           std::to_string(value) + ", bound " + std::to_string(gate_bound) + (initial_state ? ", state" : "");
  }
};

inline at::Tensor offsets(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu = {0};
  for (const int64_t n : lengths) cu.push_back(cu.back() + n);
  return at::tensor(at::ArrayRef<int64_t>(cu), at::kLong);
}

inline ops::KdaArgs random_kda(const KdaCase& c, uint64_t seed = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto normal = [&](at::IntArrayRef sizes) { return at::randn(sizes, generator, at::kFloat); };
  const int64_t T = c.tokens(), H = c.heads;
  ops::KdaArgs x;
  x.q = normal({T, H, c.key});
  x.k = normal({T, H, c.key});
  x.v = normal({T, H, c.value});
  x.z = normal({T, H, c.key}) * 2 - 2;
  x.A_log = normal({H}) * 0.5;
  x.dt_bias = normal({H, c.key});
  x.b = normal({T, H});
  x.gate_bound = c.gate_bound;
  if (c.initial_state) {
    x.initial_state = normal({static_cast<int64_t>(c.lengths.size()), H, c.key, c.value}) * 0.5;
  }
  x.cu_seqlens = offsets(c.lengths);
  return x;
}

// Calls fn(tensor) on every differentiable input, in the order of the op's arguments.
template <class Fn>
void for_each_input(ops::KdaArgs& x, Fn&& fn) {
  for (at::Tensor* t : {&x.q, &x.k, &x.v, &x.z, &x.A_log, &x.dt_bias, &x.b}) fn(*t);
  if (x.initial_state.has_value()) fn(*x.initial_state);
}
inline const std::vector<std::string> kInputNames = {"q",     "k",       "v", "z",
                                                     "A_log", "dt_bias", "b", "initial_state"};

inline ops::KdaArgs to_dtype(ops::KdaArgs x, at::ScalarType type) {
  for_each_input(x, [&](at::Tensor& t) { t = t.to(type); });
  return x;
}

inline std::tuple<at::Tensor, at::Tensor> chunk(const ops::KdaArgs& x) {
  return ops::kda_chunk(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound, x.initial_state,
                        x.cu_seqlens);
}

inline at::Tensor step(const ops::KdaArgs& x, at::Tensor& state,
                       const std::optional<at::Tensor>& slots = std::nullopt) {
  return ops::kda_step(x.q, x.k, x.v, x.z, x.A_log, x.dt_bias, x.b, x.gate_bound, state, slots);
}

// Tokens [begin, end) of a single sequence that starts from `state`.
inline ops::KdaArgs slice_tokens(const ops::KdaArgs& x, int64_t begin, int64_t end,
                                 const std::optional<at::Tensor>& state) {
  ops::KdaArgs out = x;
  for (at::Tensor* t : {&out.q, &out.k, &out.v, &out.z, &out.b}) *t = t->narrow(0, begin, end - begin);
  out.initial_state = state;
  out.cu_seqlens = offsets({end - begin});
  return out;
}

// Gradients of <o, grad_o> + <final_state, grad_state> by all inputs; an undefined grad leaves its term out.
template <class Forward>
std::vector<at::Tensor> kda_grads(ops::KdaArgs x, const at::Tensor& grad_o, const at::Tensor& grad_state,
                                  Forward&& forward) {
  std::vector<at::Tensor> inputs;
  for_each_input(x, [&](at::Tensor& t) {
    t = t.detach().requires_grad_(true);
    inputs.push_back(t);
  });
  const auto [o, state] = forward(x);
  std::vector<at::Tensor> outputs, given;
  const auto add = [&](const at::Tensor& output, const at::Tensor& grad) {
    if (!grad.defined() || !output.requires_grad()) return;
    outputs.push_back(output);
    given.push_back(grad.to(output.scalar_type()));
  };
  add(o, grad_o);
  add(state, grad_state);
  if (outputs.empty()) return std::vector<at::Tensor>(inputs.size());
  return torch::autograd::grad(outputs, inputs, given, std::nullopt, false, /*allow_unused=*/true);
}

}  // namespace godwit::test
