#include "godwit/model/vision.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/model/vision_position.h"
#include "godwit/ops/flash_packed.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/rotate_qkv.h"

namespace godwit {
namespace {

using at::Tensor;

// The release names none: PyTorch's RMSNorm then takes the epsilon of fp32, for bf16 inputs too.
constexpr double kTowerEps = 0x1p-23;
// Patches of one size, on average, from which each size has an attention call of its own.
constexpr int64_t kLargeRun = 8192;
// Entries of the matrix from the cells of the position grid to those of all sizes, up to which it is made.
constexpr int64_t kPositionMatrix = int64_t{1} << 22;

// `count` items of one grid, one after another: they are computed together.
struct Run {
  VisionGrid grid;
  int64_t count = 0;

  int64_t patches() const { return count * grid.patches(); }
};

std::vector<Run> runs_of(const std::vector<VisionGrid>& grids) {
  std::vector<Run> runs;
  for (const VisionGrid& grid : grids) {
    if (runs.empty() || !(runs.back().grid == grid)) runs.push_back({.grid = grid});
    ++runs.back().count;
  }
  return runs;
}

// Items of one grid brought together, in the order in which the grids first appear. A batch has pictures of a
// few sizes in any order; each size is then one call of attention, and one table of places.
struct Order {
  std::vector<VisionGrid> grids;
  std::vector<int64_t> patches;  // [P] which patch of the input comes next; empty: all stay where they are
  std::vector<int64_t> vectors;  // [vectors] which vector of this order belongs there in the input's
};

Order by_grid(const VisionConfig& config, const std::vector<VisionGrid>& grids) {
  std::vector<VisionGrid> kinds;
  std::vector<std::vector<size_t>> items;  // of each kind
  for (size_t i = 0; i < grids.size(); ++i) {
    const auto kind = std::ranges::find(kinds, grids[i]) - kinds.begin();
    if (kind == std::ssize(kinds)) kinds.push_back(grids[i]), items.emplace_back();
    items[kind].push_back(i);
  }
  Order order;
  if (kinds.size() == runs_of(grids).size()) {
    order.grids = grids;
    return order;
  }
  std::vector<int64_t> patch_begin{0}, vector_begin{0};  // in the input
  for (const VisionGrid& grid : grids) {
    patch_begin.push_back(patch_begin.back() + grid.patches());
    vector_begin.push_back(vector_begin.back() + vision_tokens(config, grid));
  }
  order.vectors.resize(vector_begin.back());
  int64_t at = 0;
  for (const std::vector<size_t>& kind : items) {
    for (const size_t i : kind) {
      order.grids.push_back(grids[i]);
      for (int64_t p = patch_begin[i]; p < patch_begin[i + 1]; ++p) order.patches.push_back(p);
      for (int64_t v = vector_begin[i]; v < vector_begin[i + 1]; ++v) order.vectors[v] = at++;
    }
  }
  return order;
}

Tensor rows_in_order(const Tensor& x, const std::vector<int64_t>& order) {
  return order.empty() ? x : x.index_select(0, at::tensor(order, at::kLong).to(x.device()));
}

// Sizes of frames, each once. A batch has a few: their tables are made on the CPU and moved together, as a
// few moves and small products for each size would cost a small tower as much as a block.
struct FrameSizes {
  std::vector<VisionGrid> grids;
  std::vector<int64_t> begin{0};  // of their cells in the tables

  int64_t cells() const { return begin.back(); }
  size_t find(const VisionGrid& grid) const {
    return std::ranges::find_if(
               grids, [&](const VisionGrid& g) { return g.rows == grid.rows && g.columns == grid.columns; }) -
           grids.begin();
  }
};

FrameSizes frame_sizes(const std::vector<Run>& runs) {
  FrameSizes sizes;
  for (const Run& run : runs) {
    if (sizes.find(run.grid) < sizes.grids.size()) continue;
    sizes.grids.push_back({.frames = 1, .rows = run.grid.rows, .columns = run.grid.columns});
    sizes.begin.push_back(sizes.begin.back() + run.grid.in_frame());
  }
  return sizes;
}

// Runs' rows of x, whose gradients are put together in one piece.
std::vector<Tensor> by_run(const Tensor& x, const std::vector<Run>& runs) {
  if (runs.size() == 1) return {x};
  std::vector<int64_t> sizes;
  for (const Run& run : runs) sizes.push_back(run.patches());
  return x.split_with_sizes(sizes);
}

Tensor joined(std::vector<Tensor> parts) {
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

class Tower {
 public:
  Tower(const VisionConfig& config, const VisionWeights& weights, const std::vector<VisionGrid>& grids)
      : v_(config), w_(weights), runs_(runs_of(grids)), sizes_(frame_sizes(runs_)) {
    together_ = runs_.size() > 1 && sizes_.cells() * v_.pos_emb_height * v_.pos_emb_width <= kPositionMatrix;
    rotation_ = rotation();
    int64_t patches = 0;
    for (const Run& run : runs_) {
      moving_ |= run.grid.frames > 1;
      patches += run.patches();
    }
    // One call over sequences of all lengths beats a call a size, unless these are large (docs/vision.md).
    at_once_ = runs_.size() > 1 && patches < kLargeRun * std::ssize(runs_);
    if (at_once_) offsets_ = sequence_offsets();
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
    const std::vector<Tensor> parts = by_run(x, runs_);
    std::vector<Tensor> out;
    for (size_t i = 0; i < runs_.size(); ++i) {
      const int64_t count = runs_[i].count;
      const auto& [frames, rows, columns] = runs_[i].grid;
      const Tensor mean = frames > 1 ? parts[i].view({count, frames, rows * columns, W}).mean(1) : parts[i];
      out.push_back(mean.reshape({count, rows / mh, mh, columns / mw, mw, W})
                        .transpose(2, 3)
                        .reshape({count * rows * columns / (mh * mw), mh * mw * W}));
    }
    return joined(std::move(out));
  }

 private:
  // The grid at each of sizes_, [in_frame, W] in the weights' type.
  std::vector<Tensor> frame_positions() const {
    std::vector<Tensor> parts;
    if (!together_) {
      for (const VisionGrid& grid : sizes_.grids) parts.push_back(position_at_size(v_, w_.pos_emb, grid));
      return parts;
    }
    for (const VisionGrid& grid : sizes_.grids) parts.push_back(position_weights(v_, grid));
    const at::ScalarType wide = w_.pos_emb.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const Tensor weights = joined(std::move(parts)).to(wide).to(w_.pos_emb.device());
    const Tensor all = at::matmul(weights, w_.pos_emb.to(wide).reshape({-1, v_.hidden}));
    std::vector<int64_t> cells;
    for (const VisionGrid& grid : sizes_.grids) cells.push_back(grid.in_frame());
    return all.to(w_.pos_emb.scalar_type()).split_with_sizes(cells);
  }

  // [P, W] in the weights' type: the grid at each item's size, and for several frames their times.
  Tensor positions() const {
    const std::vector<Tensor> frames = frame_positions();
    std::vector<Tensor> parts;
    for (const Run& run : runs_) {
      Tensor part = frames[sizes_.find(run.grid)].unsqueeze(0);  // [1, in_frame, W]
      if (run.grid.frames > 1) {
        const Tensor time = frame_embedding(v_, run.grid.frames).to(part.options());
        part = part + time.unsqueeze(1);
      }
      parts.push_back(part.repeat({run.count, 1, 1}).view({run.patches(), v_.hidden}));
    }
    return joined(std::move(parts));
  }

  // [P, d / 2, 2] (cos, sin), as rotate_qkv takes them.
  Tensor rotation() const {
    const bool fp64 = w_.patch_proj.scalar_type() == at::kDouble;
    const auto options = w_.patch_proj.options().dtype(fp64 ? at::kDouble : at::kFloat).requires_grad(false);
    std::vector<Tensor> parts;
    if (!together_) {
      for (const Run& run : runs_)
        parts.push_back(rotation_of(v_, run.grid, options).repeat({run.count * run.grid.frames, 1, 1}));
      return joined(std::move(parts));
    }
    for (const VisionGrid& grid : sizes_.grids)
      parts.push_back(rotation_of(v_, grid, options.device(at::kCPU)));
    std::vector<int64_t> cells;  // of each patch
    for (const Run& run : runs_) {
      const int64_t begin = sizes_.begin[sizes_.find(run.grid)];
      for (int64_t i = 0; i < run.patches(); ++i) cells.push_back(begin + i % run.grid.in_frame());
    }
    return rows_in_order(joined(std::move(parts)).to(options.device()), cells);
  }

  // Where the sequences of the first kind of attention begin, [N + 1]: whole items, or frames.
  Tensor sequence_offsets() const {
    std::vector<int64_t> at{0};
    for (const Run& run : runs_) {
      const int64_t frames = v_.time == VisionTime::kJoint ? 1 : run.grid.frames;
      for (int64_t i = 0; i < run.count * frames; ++i) at.push_back(at.back() + run.grid.patches() / frames);
    }
    return at::tensor(at, at::kLong);
  }

  // [patches of the run, H d] of its q, k, v. A row of the batch is a whole item, a frame, or (`in_time`) one
  // place in all frames of an item.
  Tensor attend_run(const Run& run, const Tensor& q, const Tensor& k, const Tensor& v, bool in_time) const {
    const VisionGrid& grid = run.grid;
    const int64_t H = v_.heads, d = v_.head_dim();
    const int64_t frames = v_.time == VisionTime::kJoint ? 1 : grid.frames;
    const auto part = [&](const Tensor& t) {
      if (!in_time) return t.reshape({run.count * frames, -1, H, d}).transpose(1, 2);
      return t.reshape({run.count, frames, grid.in_frame(), H, d})
          .permute({0, 2, 3, 1, 4})
          .reshape({run.count * grid.in_frame(), H, frames, d});
    };
    const Tensor o = at::scaled_dot_product_attention(part(q), part(k), part(v), {}, /*dropout_p=*/0.0,
                                                      /*is_causal=*/false);
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
    const auto [q, k, v] = ops::rotate_qkv(qkv, rotation_);
    if (at_once_ && !in_time && ops::takes_flash_packed(q, v)) {
      const double scale = 1.0 / std::sqrt(static_cast<double>(d));
      const Tensor o = ops::flash_packed(q, k, v, offsets_, offsets_, {.scale = scale, .causal = false});
      return ops::linear(o.reshape({P, H * d}), block.wo);
    }
    const std::vector<Tensor> qs = by_run(q, runs_), ks = by_run(k, runs_), vs = by_run(v, runs_);
    std::vector<Tensor> out;
    for (size_t i = 0; i < runs_.size(); ++i) {
      if (in_time && runs_[i].grid.frames == 1)
        out.push_back(at::zeros({runs_[i].patches(), H * d}, x.options()));
      else
        out.push_back(attend_run(runs_[i], qs[i], ks[i], vs[i], in_time));
    }
    return ops::linear(joined(std::move(out)), block.wo);
  }

  const VisionConfig& v_;
  const VisionWeights& w_;
  std::vector<Run> runs_;
  FrameSizes sizes_;
  bool together_ = false;  // sizes_' tables are made in one piece
  Tensor rotation_;
  bool moving_ = false;   // some item has several frames
  bool at_once_ = false;  // where LibTorch has packed flash attention
  Tensor offsets_;        // of at_once_
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
  const Order order = by_grid(v, input.grids);
  const Tower tower(v, weights, order.grids);
  const Tensor merged = tower.merge(tower.encode(rows_in_order(input.patches, order.patches)));
  const Tensor inner = at::gelu(ops::linear(merged, weights.proj0), "none");
  const Tensor vectors = ops::rms_norm(ops::linear(inner, weights.proj2), weights.post_norm, v.projector_eps);
  return rows_in_order(vectors, order.vectors);
}

}  // namespace godwit
