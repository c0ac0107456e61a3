#include "godwit/plan/train_memory.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/plan/activations.h"
#include "godwit/plan/parameters.h"

namespace godwit {
namespace {

constexpr double kFp32 = 4.0, kInt64 = 8.0;
constexpr double kMiB = 1 << 20;
constexpr double kMuonBatch = 1 << 24;    // elements of one Newton-Schulz call (train/optimizer.h)
constexpr double kMuonInCache = 1 << 16;  // smaller matrices need no workspace on the CPU (train/muon.cpp)
constexpr double kKeptProducts = 256 * kMiB;  // ops/moe_experts keeps the experts' products up to this
constexpr double kProbeTokens = 128;          // train/balance: tokens whose choices are compared
constexpr double kHistogramBins = 1000;
// Resident beside the tensors, with LibTorch 2.13: 74 MiB of code and packed data that are touched, and 56
// MiB that the runtime allocates before the first tensor.
constexpr double kProcess = 130 * kMiB;

double d(int64_t n) {
  return static_cast<double>(n);
}

struct Weights {
  double bytes = 0, state = 0, head = 0, muon_work = 0;
  struct Layer {
    double token = 0, channel = 0;  // gradients of the two sub-layers
  };
  std::vector<Layer> layers;
  double gradients = 0;
};

Weights measure_weights(const ModelConfig& config, const TrainShape& shape) {
  Weights w;
  w.layers.resize(config.layers);
  for_each_size(config, [&](const SizedParam& p) {
    const ParamInfo& info = p.info;
    w.bytes += p.bytes(shape.bf16);
    w.state += p.state_bytes(shape.bf16);
    if (!p.trained) return;
    w.gradients += p.bytes(shape.bf16);
    if (info.role == (config.tie_embeddings ? ParamRole::kEmbedding : ParamRole::kHead)) w.head = p.count;
    if (p.layer >= 0) {
      const bool token = info.name.find("self_attn") != std::string::npos;
      Weights::Layer& layer = w.layers[p.layer];
      (token ? layer.token : layer.channel) += p.bytes(shape.bf16);
    }
    if (!p.muon) return;
    // Muon on this shape: the update, the iterate and its successor, and two Gram matrices of the smaller
    // side.
    const double cols = d(info.shape.back());
    const double rows = info.role == ParamRole::kExperts ? d(info.shape[1])
                        : info.head_rows > 0             ? d(info.head_rows)
                                                         : d(info.shape[0]);
    const double small = std::min(rows, cols);
    if (!shape.cuda && small <= 128 && rows * cols <= kMuonInCache) return;
    // Equal matrices of all layers share a call of up to kMuonBatch elements.
    const double alike = p.count / (rows * cols) * d(config.layers);
    const double count = std::min(alike, std::max(1.0, (shape.cuda ? 4 : 1) * kMuonBatch / (rows * cols)));
    const double elements = rows * cols + 2 * (rows * cols + small * small);
    w.muon_work = std::max(w.muon_work, count * elements * (shape.cuda ? 2.0 : kFp32));  // bf16 on a GPU
  });
  return w;
}

// One decoder layer: what it keeps for its backward and what the backward needs besides, in bytes.
struct LayerCost {
  double token_kept = 0, channel_kept = 0;  // norms, mixes and new sums included
  double token_work = 0, channel_work = 0;
  double forward_work = 0;
  double mix_work = 0;  // gradients of the sources of one mix, before they are added to the others
  int64_t sources = 1;
  double kept() const { return token_kept + channel_kept; }
};

class Costs {
 public:
  Costs(const ModelConfig& config, const TrainShape& shape)
      : c_(config), s_(shape), T_(d(shape.micro_tokens)), m_(shape.bf16 ? 2.0 : kFp32) {}

  double stream() const { return T_ * d(c_.hidden) * m_; }  // one tensor [T, D]
  LayerCost layer(int64_t i) const;
  // Kept by a mix of `sources` [T, D] tensors besides the tensors.
  double mix_kept(int64_t sources) const;
  double mix_work(int64_t sources) const;
  int64_t sources(int64_t layer, bool channel) const;
  bool keeps_products() const;
  double expert_scratch() const;

 private:
  double token_mixer_kept(int64_t layer) const;
  double channel_mixer_kept(int64_t layer) const;
  double experts_kept() const;
  double glu_kept(double width) const;  // a token, the output included

  const ModelConfig& c_;
  const TrainShape& s_;
  double T_, m_;
};

int64_t Costs::sources(int64_t layer, bool channel) const {
  if (c_.attn_res == AttnResKind::kNone) return 1;
  if (c_.attn_res == AttnResKind::kFull) return 2 * layer + 1 + (channel ? 1 : 0);
  const int64_t block = c_.attn_res_block;
  return (layer + block - 1) / block + 1 + (channel && layer % block == 0 ? 1 : 0);
}

// fp32 copies of all sources, stacked.
double Costs::mix_kept(int64_t sources) const {
  return s_.fused.mix || sources == 1 ? 0 : d(sources) * T_ * d(c_.hidden) * kFp32;
}

double Costs::mix_work(int64_t sources) const {
  if (sources == 1) return 0;
  const double each = T_ * d(c_.hidden);
  if (!s_.fused.mix) return d(sources) * each * (3 * kFp32 + m_);
  return d(sources) * each *
         (s_.bf16 && !s_.cuda ? 2 * kFp32 + m_ : m_);  // fp32 copies around the CPU's kernel
}

double Costs::glu_kept(double width) const {
  if (s_.fused.glu) return 3 * width * m_;
  // gate and up in fp32, tanh and sigmoid of the gate, its bounded form, both of the up branch, the products
  return width * (6 * kFp32 + m_);
}

bool Costs::keeps_products() const {
  if (s_.cuda) return false;  // the backward computes them again
  const double rows = T_ * d(c_.moe.experts_per_token), padded = d((c_.moe.inner + 15) / 16 * 16);
  return rows * 2 * padded * kFp32 <= kKeptProducts;
}

double Costs::expert_scratch() const {
  const MoeConfig& m = c_.moe;
  const int64_t width = m.latent > 0 ? m.latent : c_.hidden;
  return T_ * d(m.experts_per_token) * d((width + 15) / 16 * 16) * kFp32;
}

double Costs::experts_kept() const {
  const MoeConfig& m = c_.moe;
  const double rows = T_ * d(m.experts_per_token), I = d(m.inner), L = d(m.latent > 0 ? m.latent : c_.hidden);
  if (s_.fused.experts) return keeps_products() ? rows * 2 * d((m.inner + 15) / 16 * 16) * kFp32 : 0;
  // Sorted rows and where they came from and go to; the gated products; results in fp32.
  return rows * (2 * kInt64 + L * m_ + glu_kept(I) + L * kFp32);
}

double Costs::token_mixer_kept(int64_t layer) const {
  KeptValues kept = kept_by_token_mixer(c_, layer);
  double bytes = T_ * kept.bytes(m_);
  if (!c_.kda_layer[layer]) return bytes;
  const double inner = d(c_.kda.heads * c_.kda.head_dim), width = d(c_.kda.head_dim);
  bytes -=
      T_ * inner * width / 128.0 * kFp32;  // in its place: states between segments, none before the first
  if (s_.cuda) return bytes - T_ * inner * kFp32;  // the kernels on a GPU keep their inputs only
  const double segments = d(s_.micro_tokens / s_.context) * d((s_.context - 1) / 128);
  return bytes + segments * inner * width * kFp32;
}

double Costs::channel_mixer_kept(int64_t layer) const {
  if (!c_.is_moe(layer)) return T_ * glu_kept(d(c_.intermediate));
  const MoeConfig& m = c_.moe;
  double bytes = experts_kept();
  if (m.shared_experts > 0) bytes += T_ * glu_kept(d(m.shared_experts * m.inner));
  if (m.latent > 0) bytes += T_ * d(m.latent) * m_ * (m.latent_norm ? 3.0 : 2.0);
  const double E = d(m.experts), k = d(m.experts_per_token);
  bytes += T_ * (E * kFp32 + 2 * k * kFp32);
  if (!s_.fused.router) bytes += T_ * (E + k) * kInt64;  // the order of all experts, of which k are a view
  if (s_.bf16) bytes += T_ * d(c_.hidden) * kFp32 + E * d(c_.hidden) * kFp32;  // the router runs in fp32
  return bytes;
}

LayerCost Costs::layer(int64_t i) const {
  LayerCost cost;
  const double s = stream();
  const int64_t attention = sources(i, false), channel = sources(i, true);
  cost.sources = channel;
  // A mix, its normalised copy and the new sum; one source is its own mix.
  cost.token_kept = token_mixer_kept(i) + (attention > 1 ? 3 : 2) * s + mix_kept(attention);
  cost.channel_kept = channel_mixer_kept(i) + (channel > 1 ? 3 : 2) * s + mix_kept(channel);
  if (c_.kda_layer[i]) {
    const double inner = d(c_.kda.heads * c_.kda.head_dim) * T_;
    cost.token_work = s + 2 * inner * m_ + (s_.bf16 ? 8 * inner * kFp32 : 0);
  } else {
    cost.token_work = s + 3 * T_ * d(c_.mla.heads * c_.mla.qk_dim()) * m_;
  }
  cost.mix_work = mix_work(channel);
  if (!c_.is_moe(i)) {
    cost.channel_work = s + 2 * T_ * d(c_.intermediate) * m_;  // three gradients; the product is gone
    return cost;
  }
  const MoeConfig& m = c_.moe;
  const double E = T_ * d(m.experts), L = T_ * d(m.latent > 0 ? m.latent : c_.hidden);
  const double rows = T_ * d(m.experts_per_token), width = d(m.latent > 0 ? m.latent : c_.hidden);
  const double freed = experts_kept() + 2 * L * m_;  // before the router's turn
  if (s_.fused.experts && s_.cuda)  // workspace: rows and their gradients, those of gate and up, product
    cost.channel_work =
        std::max(s + 2 * L * m_ + rows * (2 * width + 3 * d(m.inner)) * m_, 2 * s + E * kFp32);
  else if (s_.fused.experts)
    cost.channel_work = std::max(s + 3 * L * m_ + (s_.bf16 ? 2 * L * kFp32 : 0), 2 * s + E * kFp32 - freed);
  else  // gradients of the results in fp32 and behind the cast, and of the last products
    cost.channel_work = s + rows * (width * (2 * kFp32 + m_) + d(m.inner) * (2 * kFp32 + m_));
  // The histogram of a composed balancer: positions, bins and cells of every score.
  if (s_.quantile && !s_.fused.histogram) cost.forward_work = E * (2 * kFp32 + 2 * kInt64);
  return cost;
}

// The vision tower and its projector: what they keep, and the most their backward needs besides.
struct VisionCost {
  double kept = 0, work = 0;
};

VisionCost vision_cost(const ModelConfig& config, const TrainShape& shape) {
  if (shape.patches == 0 || !config.vision) return {};
  const VisionConfig& v = *config.vision;
  const double m = shape.bf16 ? 2.0 : kFp32, P = d(shape.patches), V = d(shape.vectors), D = d(config.hidden);
  const double W = d(v.hidden), Q = d(v.qkv_hidden), I = d(v.intermediate), H = d(v.heads);
  const double pixels = 3 * d(v.patch_size * v.patch_size), merged = d(v.merge()) * W;
  VisionCost cost;
  // The patches as they came and by size, in the weights' type; the rotation.
  cost.kept = P * pixels * (kFp32 + m) + P * d(v.head_dim()) * kFp32;
  // A block: the stream before each half and its norm, queries, keys, values and output of attention with the
  // sums' logarithms, the MLP before and behind its GELU. The output is gathered once more where sizes
  // differ.
  const double gathered = shape.cuda && shape.bf16 ? 0 : Q;
  cost.kept += d(v.layers) * P * ((4 * W + 4 * Q + gathered + 2 * I) * m + H * kFp32);
  cost.kept += P * W * m;                     // before the last norm
  cost.kept += V * (3 * merged + 2 * D) * m;  // projector: merged, before and behind the GELU; vectors
  cost.kept += V * D * m;                     // and in the order of the text
  cost.work = P * std::max(W + 2 * I, 2 * W + 7 * Q) * m;
  return cost;
}

}  // namespace

FusedOps fused_ops(bool cuda) {
  if (!cuda) return {};
  const auto has_kernel = [](const char* op) {
    const auto found = c10::Dispatcher::singleton().findSchema({op, ""});
    return found.has_value() && found->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  };
  return {.mix = has_kernel("godwit::attn_res_mix_fwd"),
          .glu = has_kernel("godwit::glu_fwd"),
          .experts = has_kernel("godwit::moe_experts_fwd"),
          .router = has_kernel("godwit::moe_router_fwd"),
          .histogram = has_kernel("godwit::qb_histogram") || has_kernel("godwit::qb_histogram_fwd")};
}

TrainMemory forecast_training(const ModelConfig& config, const TrainShape& shape) {
  check(shape.context > 0 && shape.micro_tokens > 0 && shape.micro_tokens % shape.context == 0,
        "memory forecast: a micro-batch of {} tokens is not whole sequences of {}", shape.micro_tokens,
        shape.context);
  const Weights w = measure_weights(config, shape);
  const Costs costs(config, shape);
  const double T = d(shape.micro_tokens), D = d(config.hidden), V = d(config.vocab_size), s = costs.stream();

  TrainMemory base;
  base.weights = w.bytes;
  base.optimizer = w.state;
  for (int64_t i = 0; i < config.layers; ++i) {
    if (!config.is_moe(i)) continue;
    const double E = d(config.moe.experts);
    base.balance += E * (3 * kInt64 + kFp32) + (shape.quantile ? E * kHistogramBins * kInt64 : 0) +
                    std::min(T, kProbeTokens) * E * kFp32;
  }
  TrainMemory peak = base;
  const double earlier = shape.accumulate ? w.gradients : 0;
  const auto consider = [&](const char* moment, double gradients, double activations, double workspace) {
    gradients += earlier;
    if (gradients + activations + workspace <= peak.gradients + peak.activations + peak.workspace) return;
    peak.gradients = gradients, peak.activations = activations, peak.workspace = workspace;
    peak.moment = moment;
  };

  const VisionCost vision = vision_cost(config, shape);
  std::vector<LayerCost> layers;
  double kept = s + vision.kept;  // the embedded tokens, the pictures
  for (int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(costs.layer(i));
    consider("forward", 0, kept + layers[i].kept(), layers[i].forward_work);
    kept += shape.recompute ? s : layers[i].kept();
  }
  // The last mix, its normalised form (held to the end), and the loss over a few rows of logits at a time.
  const int64_t last = costs.sources(config.layers, false);
  const double out_mix = (last > 1 ? s : 0) + costs.mix_kept(last);
  const double rows = std::clamp((shape.cuda ? 1 << 28 : 1 << 25) / V, 64.0, shape.cuda ? 8192.0 : 1024.0);
  const double logits = std::min(T, rows) * V * (shape.cuda ? 2 * kFp32 : kFp32);
  const double d_x = T * D * kFp32, d_head = w.head * kFp32;
  consider("loss", 0, kept + out_mix + s, logits + d_x + d_head * (shape.cuda ? 2 : 1));
  consider("backward of the loss", w.head * (shape.bf16 ? 2 : 4), kept + out_mix + s, 2 * d_x + d_head);
  kept += s;

  consider("backward", w.head * (shape.bf16 ? 2 : 4), kept + out_mix - s, 2 * s + costs.mix_work(last));
  double gradients = shape.accumulate ? 0 : w.head * (shape.bf16 ? 2.0 : kFp32);
  for (int64_t i = config.layers - 1; i >= 0; --i) {
    const LayerCost& layer = layers[i];
    const double sources = d(layer.sources) * s;  // gradients of the stream
    if (shape.recompute) kept += layer.kept() - s;
    // Recomputing, the layer's own gradients of its sources are apart from those of the layers above.
    const double held = sources * (shape.recompute ? 2 : 1);
    consider("backward", gradients + w.layers[i].channel, kept, sources + layer.channel_work);
    kept -= layer.channel_kept;
    if (!shape.accumulate) gradients += w.layers[i].channel;  // otherwise added to those that are there
    consider("backward", gradients, kept, sources + layer.mix_work);
    consider("backward", gradients + w.layers[i].token, kept, held + layer.token_work);
    kept -= layer.token_kept;
    if (!shape.accumulate) gradients += w.layers[i].token;
  }
  if (vision.kept > 0)
    consider("backward of the pictures", shape.accumulate ? 0 : w.gradients, vision.kept, vision.work);
  consider("optimizer step", w.gradients - earlier, 0, w.muon_work);

  if (shape.cuda) return peak;
  peak.process = kProcess;
  // Rows of the experts' results, kept from call to call.
  if (config.moe.experts > 0) peak.allocator += costs.expert_scratch();
  // Large blocks come from a pool (ops/block_pool.h) in steps of 2 MiB. The small ones stay in glibc's heap,
  // where gradients that stay leave holes between activations that go: measured.
  peak.allocator += std::min(0.1 * (peak.gradients + peak.activations + peak.workspace), 0.6 * w.gradients);
  return peak;
}

std::string describe(const TrainMemory& m) {
  const auto mib = [](double bytes) { return fmt::format("{:.0f}", bytes / kMiB); };
  std::string text =
      fmt::format("{} MiB (weights {}, optimizer {}, balance {}, gradients {}, activations {}, workspace {}",
                  mib(m.total()), mib(m.weights), mib(m.optimizer), mib(m.balance), mib(m.gradients),
                  mib(m.activations), mib(m.workspace));
  if (m.process > 0) text += fmt::format(", allocator {}, process {}", mib(m.allocator), mib(m.process));
  return text + ")";
}

}  // namespace godwit
