#include "godwit/model/vision_position.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace godwit {
namespace {

using at::Tensor;

constexpr double kTheta = 10000.0;

// Keys' cubic convolution kernel with a = -0.75.
double cubic(double x) {
  constexpr double a = -0.75;
  x = std::abs(x);
  if (x <= 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
  return x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a : 0.0;
}

// [to, from] fp64: what each of `from` cells gives to each of `to` cells of the same stretch.
Tensor interpolation(int64_t from, int64_t to, bool bicubic) {
  Tensor weights = at::zeros({to, from}, at::kDouble);
  auto* w = weights.data_ptr<double>();
  for (int64_t i = 0; i < to; ++i) {
    double at = (static_cast<double>(i) + 0.5) * static_cast<double>(from) / static_cast<double>(to) - 0.5;
    if (!bicubic) at = std::max(at, 0.0);
    const auto cell = static_cast<int64_t>(std::floor(at));
    const double past = at - static_cast<double>(cell);
    for (int64_t k = bicubic ? -1 : 0; k <= (bicubic ? 2 : 1); ++k) {
      const double share = bicubic ? cubic(past - static_cast<double>(k)) : k == 0 ? 1 - past : past;
      w[i * from + std::clamp<int64_t>(cell + k, 0, from - 1)] += share;
    }
  }
  return weights;
}

}  // namespace

Tensor position_at_size(const VisionConfig& config, const Tensor& pos_emb, const VisionGrid& grid) {
  const int64_t W = config.hidden, rows = config.pos_emb_height, columns = config.pos_emb_width;
  if (grid.rows == rows && grid.columns == columns) return pos_emb.reshape({grid.in_frame(), W});
  const at::ScalarType wide = pos_emb.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto matrix = [&](int64_t from, int64_t to) {
    return interpolation(from, to, config.pos_emb_bicubic).to(pos_emb.device(), wide);
  };
  const Tensor by_rows = at::matmul(matrix(rows, grid.rows), pos_emb.to(wide).reshape({rows, columns * W}));
  const Tensor by_both =
      at::matmul(matrix(columns, grid.columns), by_rows.view({grid.rows, columns, W}));  // [rows, columns, W]
  return by_both.reshape({grid.in_frame(), W}).to(pos_emb.scalar_type());
}

Tensor position_weights(const VisionConfig& config, const VisionGrid& grid) {
  return at::kron(interpolation(config.pos_emb_height, grid.rows, config.pos_emb_bicubic),
                  interpolation(config.pos_emb_width, grid.columns, config.pos_emb_bicubic));
}

Tensor frame_embedding(const VisionConfig& config, int64_t frames) {
  const int64_t half = config.hidden / 2;
  const Tensor rate =
      at::pow(kTheta, at::arange(half, at::kDouble).neg() / static_cast<double>(std::max<int64_t>(half, 1)));
  const Tensor angle = at::outer(at::arange(frames, at::kDouble), rate);
  return at::cat({at::sin(angle), at::cos(angle)}, 1);
}

namespace {

// (cos, sin) of place * 10000^(-4 i / d) for `count` places, [count, d / 4, 2] fp64 on the CPU.
Tensor axis_turns(int64_t count, int64_t d) {
  const Tensor rate = at::pow(kTheta, at::arange(0, d, 4, at::kDouble).neg() / static_cast<double>(d));
  const Tensor angle = at::outer(at::arange(count, at::kDouble), rate);
  return at::stack({at::cos(angle), at::sin(angle)}, 2);
}

}  // namespace

Tensor rotation_of(const VisionConfig& config, const VisionGrid& grid, const at::TensorOptions& options) {
  const int64_t d = config.head_dim();
  const std::vector<int64_t> shape = {grid.rows, grid.columns, d / 4, 2};
  // The sines of an axis are few; they are spread over the grid where it is needed.
  const Tensor x = axis_turns(grid.columns, d).to(options).unsqueeze(0).expand(shape);
  const Tensor y = axis_turns(grid.rows, d).to(options).unsqueeze(1).expand(shape);
  return at::stack({x, y}, 3).view({grid.in_frame(), d / 2, 2});  // x and y by turns
}

}  // namespace godwit
