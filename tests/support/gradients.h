// Gradients for tests: by autograd and by central differences, of a fixed random projection of the output.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <vector>

#include "tests/support/compare.h"

namespace godwit::test {

using TensorFn = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// sum(fn(inputs) * projection) in the output's type.
inline at::Tensor projected(const TensorFn& fn, const std::vector<at::Tensor>& inputs,
                            const at::Tensor& projection) {
  const at::Tensor y = fn(inputs);
  return (y * projection.to(y.scalar_type())).sum();
}

// Gradient for each input (zeros where it has no influence).
inline std::vector<at::Tensor> gradients(const TensorFn& fn, const std::vector<at::Tensor>& inputs,
                                         const at::Tensor& projection) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& x : inputs) leaves.push_back(x.detach().clone().set_requires_grad(true));
  const at::Tensor loss = projected(fn, leaves, projection);
  auto grads =
      torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (!grads[i].defined()) grads[i] = at::zeros_like(leaves[i]);
  }
  return grads;
}

// Autograd against central differences, fp64 inputs. Steps along a few random directions per input, so that
// the cost does not grow with its size; a direction sees every element.
inline ::testing::AssertionResult matches_finite_difference(const TensorFn& fn,
                                                            const std::vector<at::Tensor>& inputs,
                                                            const at::Tensor& projection) {
  const at::NoGradGuard no_grad;
  constexpr double kStep = 1e-6;
  std::vector<at::Tensor> analytic;
  {
    const at::AutoGradMode with_grad(true);
    analytic = gradients(fn, inputs, projection);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (int trial = 0; trial < 4 && inputs[i].numel() > 0; ++trial) {
      const at::Tensor direction = at::randn_like(inputs[i]);
      const auto value_at = [&](double step) {
        std::vector<at::Tensor> moved = inputs;
        moved[i] = inputs[i] + step * direction;
        return projected(fn, moved, projection).item<double>();
      };
      const double numeric = (value_at(kStep) - value_at(-kStep)) / (2 * kStep);
      const double expected = (analytic[i] * direction).sum().item<double>();
      // Scale: what the sum's terms reach, so that cancellation in the projection is not held against it.
      const double scale = std::max(1.0, (analytic[i] * direction).abs().sum().item<double>());
      if (!(std::abs(numeric - expected) <= kFiniteDiff * scale)) {
        return ::testing::AssertionFailure() << "input " << i << ": finite difference " << numeric
                                             << ", autograd " << expected << ", scale " << scale;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

inline std::vector<at::Tensor> to_double(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> out;
  for (const at::Tensor& x : inputs) out.push_back(x.to(at::kDouble));
  return out;
}

}  // namespace godwit::test
