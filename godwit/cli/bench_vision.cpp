// `godwit bench vision`: the vision tower forward and backward, beside the same tower as PyTorch runs it: its
// operations and scaled_dot_product_attention, one call a size of picture. Both on the same weights and
// pictures in the same process.
#include "godwit/cli/bench_vision.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/cli/memory.h"
#include "godwit/cli/support.h"
#include "godwit/model/config_keys.h"
#include "godwit/model/vision.h"
#include "godwit/model/vision_position.h"

namespace godwit::cli {
namespace {

using at::Tensor;
using nlohmann::json;

struct Case {
  const ModelConfig& config;
  ModelWeights weights;  // of the tower alone
  std::vector<Tensor> params;
  VisionInput input;
  c10::Device device;
};

// ROWSxCOLUMNS or ROWSxCOLUMNSxFRAMES, in patches.
VisionGrid read_grid(const std::string& text) {
  VisionGrid grid;
  long rows = 0, columns = 0, frames = 1;
  int end = 0;
  const bool still = std::sscanf(text.c_str(), "%ldx%ld%n", &rows, &columns, &end) == 2 &&
                     end == static_cast<int>(text.size());
  const bool video = !still &&
                     std::sscanf(text.c_str(), "%ldx%ldx%ld%n", &rows, &columns, &frames, &end) == 3 &&
                     end == static_cast<int>(text.size());
  check(still || video, "--grids: expected ROWSxCOLUMNS or ROWSxCOLUMNSxFRAMES in patches, got {}", text);
  grid.rows = rows, grid.columns = columns, grid.frames = frames;
  return grid;
}

Case make_case(const BenchVisionArgs& args, const ModelConfig& config, c10::Device device,
               at::ScalarType dtype) {
  Case c{.config = config, .weights = weight_structure(config), .params = {}, .input = {}, .device = device};
  const auto options = at::TensorOptions(dtype).device(device);
  for_each_param(config, c.weights, [&](const ParamInfo& info, Tensor& value) {
    if (!info.name.starts_with("vision_tower.") && !info.name.starts_with("mm_projector.")) return;
    value = at::empty(info.shape, options);
    if (info.shape.size() > 1)
      value.normal_(0, config.initializer_range);
    else
      value.fill_(1);
    value.requires_grad_(true);
    c.params.push_back(value);
  });
  int64_t patches = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    for (const std::string& text : args.grids) {
      c.input.grids.push_back(read_grid(text));
      check_grid(*config.vision, c.input.grids.back(), "--grids");
      patches += c.input.grids.back().patches();
    }
  }
  c.input.patches = at::randn({patches, 3 * config.vision->patch_size * config.vision->patch_size}, options);
  return c;
}

// The tower in PyTorch's own operations, as its modules call them.
class Peer {
 public:
  explicit Peer(const Case& c) : v_(*c.config.vision), w_(*c.weights.vision), input_(c.input) {
    std::vector<Tensor> turns;
    const auto options = at::TensorOptions(at::kFloat).device(c.device);
    for (const VisionGrid& grid : input_.grids)
      turns.push_back(rotation_of(v_, grid, options).repeat({grid.frames, 1, 1}));
    turns_ = at::view_as_complex(at::cat(turns)).unsqueeze(1);
  }

  Tensor operator()() const {
    const int64_t P = input_.patches.size(0), H = v_.heads, d = v_.head_dim(), W = v_.hidden;
    Tensor x = at::linear(input_.patches, w_.patch_proj) + positions();
    const auto norm = [](const Tensor& y, const Tensor& weight, double eps) {
      return at::rms_norm(y, {y.size(-1)}, weight, eps);
    };
    constexpr double eps = 0x1p-23;
    for (const VisionBlockWeights& block : w_.blocks) {
      const Tensor qkv = at::linear(norm(x, block.norm0, eps), block.wqkv).view({P, 3, H, d});
      const std::vector<Tensor> parts = qkv.unbind(1);
      x = x + at::linear(attend(turn(parts[0]), turn(parts[1]), parts[2]).reshape({P, H * d}), block.wo);
      x = x + at::linear(at::gelu(at::linear(norm(x, block.norm1, eps), block.fc0), "tanh"), block.fc1);
    }
    x = norm(x, w_.final_norm, eps);
    std::vector<Tensor> merged;
    int64_t begin = 0;
    for (const VisionGrid& grid : input_.grids) {
      const Tensor mean = x.narrow(0, begin, grid.patches()).view({grid.frames, grid.in_frame(), W}).mean(0);
      merged.push_back(mean.view({grid.rows / v_.merge_height, v_.merge_height, grid.columns / v_.merge_width,
                                  v_.merge_width, W})
                           .transpose(1, 2)
                           .reshape({-1, v_.merge() * W}));
      begin += grid.patches();
    }
    const Tensor inner = at::gelu(at::linear(at::cat(merged), w_.proj0), "none");
    return norm(at::linear(inner, w_.proj2), w_.post_norm, v_.projector_eps);
  }

 private:
  Tensor positions() const {
    std::vector<Tensor> parts;
    for (const VisionGrid& grid : input_.grids) {
      Tensor part = position_at_size(v_, w_.pos_emb, grid).unsqueeze(0);
      if (grid.frames > 1) part = part + frame_embedding(v_, grid.frames).to(part.options()).unsqueeze(1);
      parts.push_back(part.reshape({-1, v_.hidden}));
    }
    return at::cat(parts);
  }

  Tensor turn(const Tensor& x) const {  // [P, H, d]
    const auto wide = at::toRealValueType(turns_.scalar_type());
    const Tensor pairs = at::view_as_complex(x.to(wide).reshape({x.size(0), v_.heads, -1, 2}));
    return at::view_as_real(pairs * turns_).flatten(2).to(x.scalar_type());
  }

  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v) const {
    std::vector<Tensor> out;
    int64_t begin = 0;
    for (size_t i = 0; i < input_.grids.size();) {
      size_t end = i + 1;
      while (end < input_.grids.size() && input_.grids[end] == input_.grids[i]) ++end;
      const int64_t count = static_cast<int64_t>(end - i), rows = count * input_.grids[i].patches();
      const auto heads_first = [&](const Tensor& t) {
        return t.narrow(0, begin, rows).view({count, -1, v_.heads, v_.head_dim()}).transpose(1, 2);
      };
      const Tensor o =
          at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v.contiguous()));
      out.push_back(o.transpose(1, 2).reshape({rows, -1}));
      begin += rows, i = end;
    }
    return out.size() == 1 ? out[0] : at::cat(out);
  }

  const VisionConfig& v_;
  const VisionWeights& w_;
  const VisionInput& input_;
  Tensor turns_;
};

void wait_for(c10::Device device) {
  if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
}

template <class Work>
double once_ms(c10::Device device, const Work& work) {
  wait_for(device);
  const auto begin = std::chrono::steady_clock::now();
  work();
  wait_for(device);
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

struct Pass {
  Tensor vectors;
  std::vector<Tensor> grads;
};

// Vectors, and the gradients of every parameter of their product with `direction`.
template <class Run>
Pass run_pass(Case& c, const Run& run, const Tensor& direction) {
  const Tensor vectors = run();
  vectors.backward(direction);
  Pass pass{.vectors = vectors.detach(), .grads = {}};
  for (const Tensor& param : c.params) {
    pass.grads.push_back(param.grad());
    param.mutable_grad() = Tensor();
  }
  return pass;
}

// Largest difference, as a share of the largest entry.
double relative(const Tensor& actual, const Tensor& expected) {
  const Tensor reference = expected.to(at::kCPU, at::kDouble);
  const double most = reference.abs().max().item<double>();
  const Tensor difference = actual.to(at::kCPU, at::kDouble) - reference;
  return difference.abs().max().item<double>() / std::max(most, 1e-300);
}

double worst(const std::vector<Tensor>& actual, const std::vector<Tensor>& expected) {
  double most = 0;
  for (size_t i = 0; i < actual.size(); ++i) most = std::max(most, relative(actual[i], expected[i]));
  return most;
}

// How far both towers are from ours on the CPU in fp64, on the same weights and pictures.
json agreement(Case& c, const Tensor& direction, const Pass& ours, const Pass& peers) {
  Case exact{.config = c.config,
             .weights = weight_structure(c.config),
             .params = {},
             .input = {.patches = c.input.patches.to(at::kCPU, at::kDouble), .grids = c.input.grids},
             .device = at::kCPU};
  size_t i = 0;
  for_each_param(c.config, exact.weights, [&](const ParamInfo& info, Tensor& value) {
    if (!info.name.starts_with("vision_tower.") && !info.name.starts_with("mm_projector.")) return;
    value = c.params[i++].detach().to(at::kCPU, at::kDouble).requires_grad_(true);
    exact.params.push_back(value);
  });
  const Pass reference = run_pass(
      exact, [&] { return vision_forward(exact.config, *exact.weights.vision, exact.input); },
      direction.to(at::kCPU, at::kDouble));
  return {{"vectors", relative(ours.vectors, reference.vectors)},
          {"gradients", worst(ours.grads, reference.grads)},
          {"peer_vectors", relative(peers.vectors, reference.vectors)},
          {"peer_gradients", worst(peers.grads, reference.grads)}};
}

struct Series {
  std::vector<double> ms;
  double best() const { return *std::ranges::min_element(ms); }
  double median() const {
    std::vector<double> sorted = ms;
    std::ranges::sort(sorted);
    return sorted[sorted.size() / 2];
  }
};

}  // namespace

int run_bench_vision(const BenchVisionArgs& args) {
  const c10::Device device = apply_device(args.device);
  const ModelConfig config = load_model_config(args.model);
  check(config.vision.has_value(), "{}: no vision tower", args.model);
  const at::ScalarType dtype = args.dtype == "f32" ? at::kFloat : at::kBFloat16;
  at::manual_seed(1);
  Case c = make_case(args, config, device, dtype);
  const Peer peer(c);
  const auto ours = [&] { return vision_forward(config, *c.weights.vision, c.input); };
  const Tensor direction = at::randn_like(ours().detach());

  json out = {{"device", device.str()},
              {"dtype", args.dtype},
              {"model", args.model},
              {"grids", args.grids},
              {"pictures", c.input.grids.size()},
              {"patches", c.input.patches.size(0)},
              {"vectors", direction.size(0)}};
  if (args.agreement) {
    const Pass a = run_pass(c, ours, direction), b = run_pass(c, peer, direction);
    out["relative_to_fp64"] = agreement(c, direction, a, b);
  }
  Series forward[2], both[2];
  for (int i = 0; i < args.repeats + 3; ++i) {  // by turns; the first three warm up
    const auto time = [&](int which, const auto& run) {
      double f = 0;
      {
        const at::NoGradGuard no_grad;
        f = once_ms(device, [&] { run(); });
      }
      const double fb = once_ms(device, [&] { run_pass(c, run, direction); });
      if (i >= 3) forward[which].ms.push_back(f), both[which].ms.push_back(fb);
    };
    time(0, ours);
    time(1, peer);
  }
  const char* names[] = {"godwit", "pytorch"};
  for (int which = 0; which < 2; ++which) {
    out[names[which]] = {{"forward_ms", forward[which].best()},
                         {"forward_median_ms", forward[which].median()},
                         {"forward_backward_ms", both[which].best()},
                         {"forward_backward_median_ms", both[which].median()}};
  }
  out["ratio_forward"] = forward[1].median() / forward[0].median();
  out["ratio_forward_backward"] = both[1].median() / both[0].median();
  out["peak_bytes"] = peak_memory(device);
  if (args.json) {
    print_json(out);
    return 0;
  }
  print_out("{}, {} pictures, {} patches, {} vectors, {} on {}\n", args.model, c.input.grids.size(),
            c.input.patches.size(0), direction.size(0), args.dtype, device.str());
  if (args.agreement)
    print_out("  largest difference from fp64 on the CPU, as a share of the largest entry: {}\n",
              out["relative_to_fp64"].dump());
  for (int which = 0; which < 2; ++which) {
    print_out("  {:<8} forward {:>9.3f} ms (median {:.3f})   forward, backward {:>9.3f} ms (median {:.3f})\n",
              names[which], forward[which].best(), forward[which].median(), both[which].best(),
              both[which].median());
  }
  print_out("  PyTorch's time over ours, medians: forward {:.2f}, forward and backward {:.2f}\n",
            out["ratio_forward"].get<double>(), out["ratio_forward_backward"].get<double>());
  return 0;
}

}  // namespace godwit::cli
