#include "godwit/model/vision.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/model/vision_position.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;

// The release names none: PyTorch's RMSNorm then takes the epsilon of fp32, for bf16 inputs too.
constexpr double kTowerEps = 0x1p-23;

// `count` neighbouring items of one grid, from patch `begin` on: they are computed together.
struct Run {
  VisionGrid grid;
  int64_t count = 0;
  int64_t begin = 0;

  int64_t patches() const { return count * grid.patches(); }
};

std::vector<Run> runs_of(const std::vector<VisionGrid>& grids) {
  std::vector<Run> runs;
  int64_t begin = 0;
  for (const VisionGrid& grid : grids) {
    if (runs.empty() || !(runs.back().grid == grid)) runs.push_back({.grid = grid, .begin = begin});
    ++runs.back().count;
    begin += grid.patches();
  }
  return runs;
}

Tensor joined(std::vector<Tensor> parts) {
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

class Tower {
 public:
  Tower(const VisionConfig& config, const VisionWeights& weights, const VisionInput& input)
      : v_(config), w_(weights), runs_(runs_of(input.grids)) {
    rotation_ = rotation();
    for (const Run& run : runs_) moving_ |= run.grid.frames > 1;
  }

  // [P, W] after the last norm.
  Tensor encode(const Tensor& patches) const {
    Tensor x = ops::linear(patches.to(w_.patch_proj.options()), w_.patch_proj) + positions();
    for (const VisionBlockWeights& block : w_.blocks) {
      x = x + attend(block, x, /*in_time=*/false);
      if (v_.time == VisionTime::kFactorised && moving_) x = x + attend(block, x, /*in_time=*/true);
      const Tensor inner = ops::linear(ops::rms_norm(x, block.norm1, kTowerEps), block.fc0);
      x = x + ops::linear(at::gelu(inner, "tanh"), block.fc1);
    }
    return ops::rms_norm(x, w_.final_norm, kTowerEps);
  }

  // Mean over the frames, then m patches side by side, row-major: [P, W] to [vectors, m W].
  Tensor merge(const Tensor& x) const {
    const int64_t mh = v_.merge_height, mw = v_.merge_width, W = v_.hidden;
    std::vector<Tensor> out;
    for (const Run& run : runs_) {
      const auto& [frames, rows, columns] = run.grid;
      const Tensor mean =
          x.narrow(0, run.begin, run.patches()).view({run.count, frames, rows * columns, W}).mean(1);
      out.push_back(mean.view({run.count, rows / mh, mh, columns / mw, mw, W})
                        .transpose(2, 3)
                        .reshape({run.count * rows * columns / (mh * mw), mh * mw * W}));
    }
    return joined(std::move(out));
  }

 private:
  // [P, W] in the weights' type: the grid at each item's size, and for several frames their times.
  Tensor positions() const {
    std::vector<Tensor> parts;
    for (const Run& run : runs_) {
      Tensor part = position_at_size(v_, w_.pos_emb, run.grid).unsqueeze(0);  // [1, in_frame, W]
      if (run.grid.frames > 1) {
        const Tensor time = frame_embedding(v_, run.grid.frames).to(part.options());
        part = part + time.unsqueeze(1);
      }
      parts.push_back(part.repeat({run.count, 1, 1}).view({run.patches(), v_.hidden}));
    }
    return joined(std::move(parts));
  }

  // [P, 1, 1, d / 2] complex, beside queries and keys.
  Tensor rotation() const {
    const bool fp64 = w_.patch_proj.scalar_type() == at::kDouble;
    std::vector<Tensor> parts;
    for (const Run& run : runs_)
      parts.push_back(rotation_of(v_, run.grid).repeat({run.count * run.grid.frames, 1}));
    return joined(std::move(parts))
        .to(w_.patch_proj.device(), fp64 ? at::kComplexDouble : at::kComplexFloat)
        .unsqueeze(1)
        .unsqueeze(1);
  }

  // [patches of the run, H d]. A row of the batch is a whole item, a frame, or (`in_time`) one place in all
  // frames of an item.
  Tensor attend_run(const Run& run, const Tensor& qk, const Tensor& v, bool in_time) const {
    const VisionGrid& grid = run.grid;
    const int64_t H = v_.heads, d = v_.head_dim();
    const int64_t frames = v_.time == VisionTime::kJoint ? 1 : grid.frames;
    const auto part = [&](const Tensor& t) {
      const Tensor mine = t.narrow(0, run.begin, run.patches());
      if (!in_time) return mine.reshape({run.count * frames, -1, H, d}).transpose(1, 2);
      return mine.reshape({run.count, frames, grid.in_frame(), H, d})
          .permute({0, 2, 3, 1, 4})
          .reshape({run.count * grid.in_frame(), H, frames, d});
    };
    const Tensor o =
        at::scaled_dot_product_attention(part(qk.select(1, 0)), part(qk.select(1, 1)), part(v), {},
                                         /*dropout_p=*/0.0, /*is_causal=*/false);
    if (!in_time) return o.transpose(1, 2).reshape({run.patches(), H * d});
    return o.view({run.count, grid.in_frame(), H, frames, d})
        .permute({0, 3, 1, 2, 4})
        .reshape({run.patches(), H * d});
  }

  // Attention of one pre-normed sub-layer: over whole items, over the patches of each frame, or (`in_time`)
  // over the frames at each place, where a still has nothing to add.
  Tensor attend(const VisionBlockWeights& block, const Tensor& x, bool in_time) const {
    const int64_t P = x.size(0), H = v_.heads, d = v_.head_dim();
    const Tensor qkv = ops::linear(ops::rms_norm(x, block.norm0, kTowerEps), block.wqkv).view({P, 3, H, d});
    const Tensor pairs = qkv.narrow(1, 0, 2).to(at::toRealValueType(rotation_.scalar_type()));
    const Tensor turned =
        at::view_as_real(at::view_as_complex(pairs.reshape({P, 2, H, d / 2, 2})) * rotation_).flatten(3);
    const Tensor qk = turned.to(x.scalar_type()), v = qkv.select(1, 2);
    std::vector<Tensor> out;
    for (const Run& run : runs_) {
      if (in_time && run.grid.frames == 1)
        out.push_back(at::zeros({run.patches(), H * d}, x.options()));
      else
        out.push_back(attend_run(run, qk, v, in_time));
    }
    return ops::linear(joined(std::move(out)), block.wo);
  }

  const VisionConfig& v_;
  const VisionWeights& w_;
  std::vector<Run> runs_;
  Tensor rotation_;
  bool moving_ = false;  // some item has several frames
};

}  // namespace

int64_t vision_tokens(const VisionConfig& config, const VisionGrid& grid) {
  return grid.in_frame() / config.merge();
}

void check_grid(const VisionConfig& config, const VisionGrid& grid, const std::string& where) {
  check(grid.frames >= 1 && grid.frames <= config.pos_emb_time,
        "{}: {} frames together, the tower takes 1 to {}", where, grid.frames, config.pos_emb_time);
  check(grid.rows > 0 && grid.columns > 0 && grid.rows % config.merge_height == 0 &&
            grid.columns % config.merge_width == 0,
        "{}: {} x {} patches are no whole number of {} x {}", where, grid.rows, grid.columns,
        config.merge_height, config.merge_width);
}

Tensor vision_forward(const ModelConfig& config, const VisionWeights& weights, const VisionInput& input) {
  check(config.vision.has_value(), "vision: the model's configuration has no vision tower");
  const VisionConfig& v = *config.vision;
  int64_t patches = 0;
  for (const VisionGrid& grid : input.grids) {
    check_grid(v, grid, "vision");
    patches += grid.patches();
  }
  const int64_t width = 3 * v.patch_size * v.patch_size;
  check(input.patches.dim() == 2 && input.patches.size(0) == patches && input.patches.size(1) == width,
        "vision: expected patches [{}, {}], got {}", patches, width, c10::str(input.patches.sizes()));
  if (patches == 0) return at::zeros({0, config.hidden}, weights.post_norm.options());
  const Tower tower(v, weights, input);
  const Tensor merged = tower.merge(tower.encode(input.patches));
  const Tensor inner = at::gelu(ops::linear(merged, weights.proj0), "none");
  return ops::rms_norm(ops::linear(inner, weights.proj2), weights.post_norm, v.projector_eps);
}

}  // namespace godwit
