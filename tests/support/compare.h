// One comparison for every test: reports the worst element and its place.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/limits.h"

namespace godwit::test {

// Passes when |actual - expected| <= tolerance * scale everywhere, scale = max(|expected|) (1 if that is 0):
// an error relative to the tensor's largest entry, which is what rounding in sums of such entries is
// proportional to. NaN, infinity or a shape difference fails.
inline ::testing::AssertionResult close(const at::Tensor& actual, const at::Tensor& expected,
                                        double tolerance) {
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const at::Tensor a = actual.detach().to(at::kCPU, at::kDouble).reshape(-1);
  const at::Tensor e = expected.detach().to(at::kCPU, at::kDouble).reshape(-1);
  if (!at::isfinite(a).all().item<bool>()) {
    const auto where = at::nonzero(at::isfinite(a).logical_not())[0][0].item<int64_t>();
    return ::testing::AssertionFailure() << "not finite at flat index " << where << " of " << actual.sizes()
                                         << ": " << a[where].item<double>();
  }
  const double largest = e.abs().max().item<double>();
  const double scale = largest > 0 ? largest : 1.0;
  const at::Tensor error = (a - e).abs();
  const auto where = error.argmax().item<int64_t>();
  const double worst = error[where].item<double>() / scale;
  if (worst <= tolerance) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "worst error " << worst << " of the largest entry (limit " << tolerance << ") at flat index "
         << where << " of " << actual.sizes() << ": got " << a[where].item<double>() << ", expected "
         << e[where].item<double>();
}

// Passes when |actual - expected| <= tolerance |expected| in the Euclidean norm: what many roundings of one
// size come to. NaN, infinity or a shape difference fails.
inline ::testing::AssertionResult close_norm(const at::Tensor& actual, const at::Tensor& expected,
                                             double tolerance) {
  if (actual.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure() << "shape " << actual.sizes() << ", expected " << expected.sizes();
  }
  if (actual.numel() == 0) return ::testing::AssertionSuccess();
  const at::Tensor e = expected.detach().to(at::kCPU, at::kDouble);
  const double error = (actual.detach().to(at::kCPU, at::kDouble) - e).norm().item<double>();
  const double size = e.norm().item<double>();
  if (error <= tolerance * size) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "error of norm " << error << " where the expected tensor has "
                                       << size << " (limit " << tolerance << " of it)";
}

// Bit equality, NaN equal to NaN.
inline ::testing::AssertionResult bit_equal(const at::Tensor& actual, const at::Tensor& expected) {
  if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type()) {
    return ::testing::AssertionFailure() << actual.sizes() << " " << actual.scalar_type() << ", expected "
                                         << expected.sizes() << " " << expected.scalar_type();
  }
  const at::Tensor differs =
      actual.ne(expected).logical_and(actual.eq(actual).logical_or(expected.eq(expected)));
  if (!differs.any().item<bool>()) return ::testing::AssertionSuccess();
  const auto where = at::nonzero(differs.reshape(-1))[0][0].item<int64_t>();
  return ::testing::AssertionFailure()
         << differs.sum().item<int64_t>() << " elements differ, the first at flat index " << where << ": "
         << actual.reshape(-1)[where].item<double>() << " against "
         << expected.reshape(-1)[where].item<double>();
}

}  // namespace godwit::test
