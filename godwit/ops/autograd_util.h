// Shared by the ops that have a backward of their own. Included only by ops/*.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace godwit::ops {

template <class Signature>
auto typed_handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether a backward through these inputs can be asked for.
template <class... Tensors>
bool needs_grad(const Tensors&... inputs) {
  const auto requires_grad = [](const auto& x) {
    if constexpr (std::is_same_v<std::decay_t<decltype(x)>, at::Tensor>) {
      return x.defined() && x.requires_grad();
    } else {
      return x.has_value() && x->requires_grad();
    }
  };
  return at::GradMode::is_enabled() && (requires_grad(inputs) || ...);
}

// Identity whose backward throws: gradients of our backwards are not implemented, and must not silently be
// zero.
class OnceDifferentiable : public torch::autograd::Function<OnceDifferentiable> {
 public:
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, const std::string& op,
                                                const at::Tensor& /*anchor: requires grad*/,
                                                const torch::autograd::variable_list& grads) {
    ctx->saved_data["op"] = op;
    torch::autograd::variable_list out;
    for (const auto& grad : grads) out.push_back(grad.alias());
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list&) {
    TORCH_CHECK(false, ctx->saved_data["op"].toStringRef(), ": double backward is not implemented");
  }
};

// What a Function::backward returns: under create_graph, differentiating the result throws. `anchor` is an
// input that requires grad.
inline torch::autograd::variable_list once_differentiable(const char* op, const at::Tensor& anchor,
                                                          torch::autograd::variable_list grads) {
  if (!at::GradMode::is_enabled()) return grads;
  torch::autograd::variable_list defined;
  for (const auto& grad : grads) {
    if (grad.defined()) defined.push_back(grad);
  }
  const auto guarded = OnceDifferentiable::apply(std::string(op), anchor, defined);
  auto next = guarded.begin();
  for (auto& grad : grads) {
    if (grad.defined()) grad = *next++;
  }
  return grads;
}

// Gradients of `inputs` by running a plain composition again under autograd: memory for one call at a time
// instead of for all that were run. `forward(leaves)` returns the outputs; an absent gradient counts as zero.
template <class Forward>
torch::autograd::variable_list composition_grads(const torch::autograd::variable_list& inputs,
                                                 const std::vector<std::optional<at::Tensor>>& output_grads,
                                                 const Forward& forward) {
  const at::AutoGradMode grad_mode(true);
  torch::autograd::variable_list leaves, outputs, given, grads(inputs.size());
  for (const auto& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
  const torch::autograd::variable_list all = forward(leaves);
  for (size_t i = 0; i < all.size(); ++i) {
    if (!output_grads[i].has_value() || !all[i].requires_grad()) continue;
    outputs.push_back(all[i]);
    given.push_back(*output_grads[i]);
  }
  if (!outputs.empty()) {
    grads = torch::autograd::grad(outputs, leaves, given, /*retain_graph=*/std::nullopt,
                                  /*create_graph=*/false, /*allow_unused=*/true);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!grads[i].defined()) grads[i] = at::zeros_like(inputs[i]);
  }
  return grads;
}

// Undefined if absent.
inline at::Tensor or_undefined(const std::optional<at::Tensor>& x) {
  return x.has_value() ? *x : at::Tensor();
}
inline std::optional<at::Tensor> or_none(const at::Tensor& x) {
  return x.defined() ? std::optional(x) : std::nullopt;
}

}  // namespace godwit::ops
