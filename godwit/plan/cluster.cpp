#include "godwit/plan/cluster.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/plan/activations.h"
#include "godwit/plan/parameters.h"
#include "godwit/plan/plan.h"

namespace godwit {
namespace {

constexpr double kBf16 = 2.0;
constexpr double kSystemBytes = 2.0 * (1 << 30);  // a CUDA context and NCCL's channels and buffers
constexpr double kLogitValues = 1 << 28;          // logits held at once on a GPU (ops/linear_cross_entropy)

double positive(int64_t n) {
  return static_cast<double>(n);
}

// One layer's (or table's) weights and optimiser state in bytes, by how they are spread.
struct Size {
  double split = 0, whole = 0, experts = 0;                    // over TP, not at all, over EP
  double split_state = 0, whole_state = 0, experts_state = 0;  // fp32 master and moments of these
  Size& operator+=(const Size& o) {
    split += o.split, whole += o.whole, experts += o.experts;
    split_state += o.split_state, whole_state += o.whole_state, experts_state += o.experts_state;
    return *this;
  }
};

// Matrices with a head, an inner or a vocabulary dimension are cut along it. The low-rank inputs, the router,
// the latent projections (W_down runs in one GEMM with the router) and the norms are not.
bool is_split(const ParamInfo& info) {
  switch (info.role) {
    case ParamRole::kEmbedding:
    case ParamRole::kHead:
    case ParamRole::kConv:
    case ParamRole::kDecay:
      return true;
    case ParamRole::kMatrix:
      break;
    default:
      return false;
  }
  for (const char* whole :
       {"f_a_proj", "g_a_proj", "q_a_proj", "kv_a_proj", ".gate.weight", "routed_expert_"})
    if (info.name.find(whole) != std::string::npos) return false;
  return true;
}

bool is_vision(const ParamInfo& info) {
  return info.name.starts_with("vision_tower.") || info.name.starts_with("mm_projector.");
}

struct Sizes {
  std::vector<Size> layers;
  Size first, last;  // embedding and vision; output norm and head
};

Sizes measure(const ModelConfig& config) {
  Sizes sizes;
  sizes.layers.resize(config.layers);
  for_each_size(config, [&](const SizedParam& p) {
    if (is_vision(p.info)) return;  // added below, as a whole
    const double bytes = p.bytes(/*bf16=*/true), state = p.state_bytes(/*bf16=*/true);
    Size& size = p.layer >= 0                           ? sizes.layers[p.layer]
                 : p.info.role == ParamRole::kEmbedding ? sizes.first
                                                        : sizes.last;
    const bool experts = p.info.role == ParamRole::kExperts, split = is_split(p.info);
    (experts ? size.experts : split ? size.split : size.whole) += bytes;
    (experts ? size.experts_state : split ? size.split_state : size.whole_state) += state;
  });
  const ParameterCount count = make_plan(config, 1).parameters;
  double vision = 0;
  for (const char* name : {"vision_tower", "projector"})
    if (const auto found = count.by_module.find(name); found != count.by_module.end())
      vision += positive(found->second);
  sizes.first.whole += vision * kBf16;
  sizes.first.whole_state += vision * 8.0;
  return sizes;
}

// Layers [begin, end) of a stage: as even as can be, the first stages take the rest.
std::pair<int64_t, int64_t> stage_layers(int64_t layers, int64_t pp, int64_t stage) {
  const int64_t each = layers / pp, more = layers % pp;
  const int64_t begin = stage * each + std::min(stage, more);
  return {begin, begin + each + (stage < more ? 1 : 0)};
}

class Planner {
 public:
  Planner(const ModelConfig& config, const ClusterOptions& options)
      : config_(config), o_(options), sizes_(measure(config)) {
    flops_ = make_plan(config, options.context).flops.train;
  }

  // Why the layout is impossible, whatever the memory; empty if it is not.
  std::string fault(const Layout& l, int64_t gpus) const;
  ClusterPlan evaluate(const Layout& l) const;
  bool fits(const ClusterPlan& plan) const { return plan.memory.total() <= o_.gpu.memory_bytes; }
  std::vector<Layout> layouts(int64_t gpus, const ClusterOptions& given) const;
  // The layout of `gpus` GPUs that fits with the least `cost`; none fits: nullopt.
  template <class Cost>
  std::optional<ClusterPlan> best(int64_t gpus, const ClusterOptions& given, const Cost& cost) const;
  // The smallest cluster (a power of two) that holds the model.
  std::optional<ClusterPlan> smallest(const ClusterOptions& given) const;

 private:
  int64_t micro_batches(const Layout& l) const;
  GpuMemory stage_memory(const Layout& l, int64_t stage, int64_t in_flight) const;
  void communicate(ClusterPlan& plan) const;
  double seconds(double bytes, int64_t group, int64_t stride) const;

  const ModelConfig& config_;
  const ClusterOptions& o_;
  Sizes sizes_;
  double flops_ = 0;
};

std::string Planner::fault(const Layout& l, int64_t gpus) const {
  const auto divides = [](int64_t a, int64_t b) { return a > 0 && b % a == 0; };
  if (l.gpus() != gpus) return fmt::format("{} makes {} GPUs, not {}", l.text(), l.gpus(), gpus);
  if (!divides(l.tp, config_.kda.heads > 0 ? config_.kda.heads : l.tp))
    return fmt::format("TP {} does not divide the {} KDA heads", l.tp, config_.kda.heads);
  if (!divides(l.tp, config_.mla.heads > 0 ? config_.mla.heads : l.tp))
    return fmt::format("TP {} does not divide the {} attention heads", l.tp, config_.mla.heads);
  if (l.pp > config_.layers) return fmt::format("PP {} is more than the {} layers", l.pp, config_.layers);
  if (!divides(l.cp, o_.context))
    return fmt::format("CP {} does not divide {} tokens of context", l.cp, o_.context);
  const int64_t experts = std::max<int64_t>(config_.moe.experts, 1);
  if (!divides(l.ep, experts)) return fmt::format("EP {} does not divide the {} experts", l.ep, experts);
  if (!divides(l.ep, gpus / l.pp))
    return fmt::format("EP {} does not divide the {} GPUs of a pipeline stage", l.ep, gpus / l.pp);
  if (o_.batch_tokens > 0 && !divides(l.dp * o_.context, o_.batch_tokens))
    return fmt::format("a batch of {} tokens is not a whole number of sequences of {} for each of DP {}",
                       o_.batch_tokens, o_.context, l.dp);
  return {};
}

int64_t Planner::micro_batches(const Layout& l) const {
  if (o_.batch_tokens > 0) return o_.batch_tokens / (l.dp * o_.context);
  return l.pp > 1 ? 4 * l.pp : 1;
}

GpuMemory Planner::stage_memory(const Layout& l, int64_t stage, int64_t in_flight) const {
  const auto [begin, end] = stage_layers(config_.layers, l.pp, stage);
  Size size;
  for (int64_t i = begin; i < end; ++i) size += sizes_.layers[i];
  if (stage == 0) size += sizes_.first;
  if (stage == l.pp - 1) size += sizes_.last;
  const double tp = positive(l.tp), ep = positive(l.ep);
  GpuMemory m;
  m.weights = size.split / tp + size.whole + size.experts / ep;
  m.gradients = m.weights;
  const double copies = positive(l.dp * l.cp), expert_copies = positive(l.gpus() / (l.pp * l.ep));
  m.optimizer = (size.split_state / tp + size.whole_state) / copies + size.experts_state / ep / expert_copies;

  // Tokens of a micro-batch whose activations lie on this GPU: the sequence is cut over CP, and over TP (by
  // heads inside the mixers, by sequence between them).
  const double tokens = positive(o_.context) / positive(l.cp * l.tp);
  const double stream = positive(config_.hidden) * kBf16 * tokens;
  double kept = 0, layer_at_work = 0;
  for (int64_t i = begin; i < end; ++i) {
    KeptValues v = kept_by_token_mixer(config_, i);
    v += kept_by_channel_mixer(config_, i);
    v += kept_by_stream(config_);
    if (config_.is_moe(i)) {  // rows as sent, gate, up, product and result of each chosen expert
      const MoeConfig& moe = config_.moe;
      const double width = positive(moe.latent > 0 ? moe.latent : config_.hidden);
      v.model += positive(moe.experts_per_token) * (2 * width + 3 * positive(moe.inner));
    }
    const double full = v.bytes(kBf16) * tokens;
    layer_at_work = std::max(layer_at_work, full);
    kept += o_.recompute ? stream : full;
  }
  const int64_t block = config_.attn_res == AttnResKind::kBlock ? config_.attn_res_block : config_.layers;
  const double blocks = positive((end + block - 1) / block);  // finished block sums that the stage sees
  m.activations = (kept + (o_.recompute ? blocks * stream : 0)) * positive(in_flight);
  m.workspace = (o_.recompute ? 2.0 : 1.0) * layer_at_work + (blocks + 2) * stream;
  if (stage == l.pp - 1) {
    const double logits =
        std::min(kLogitValues, positive(o_.context) / positive(l.cp) * positive(config_.vocab_size));
    m.workspace += logits / tp * (4.0 + kBf16);
  }
  m.system = l.gpus() > 1 ? kSystemBytes : kSystemBytes / 4;
  return m;
}

// Time of `bytes` sent to the others of a group whose ranks lie `stride` GPUs apart: the share that leaves
// the host takes the network.
double Planner::seconds(double bytes, int64_t group, int64_t stride) const {
  if (group <= 1) return 0;
  const int64_t inside = std::clamp<int64_t>(o_.gpu.per_host / std::max<int64_t>(stride, 1), 1, group);
  const double near = positive(inside - 1) / positive(group - 1);
  return bytes * near / o_.gpu.link + bytes * (1 - near) / o_.gpu.network;
}

void Planner::communicate(ClusterPlan& plan) const {
  const Layout& l = plan.layout;
  const auto [begin, end] = stage_layers(config_.layers, l.pp, plan.fullest_stage);
  const double micro = positive(plan.micro_batches), passes = o_.recompute ? 3.0 : 2.0;  // over the layers
  const double per_cp = positive(o_.context) / positive(l.cp), per_gpu = per_cp / positive(l.tp);
  const double D = positive(config_.hidden);
  const auto others = [](int64_t n) { return positive(n - 1) / positive(n); };
  double tensor = 0, expert = 0, context = 0;
  for (int64_t i = begin; i < end; ++i) {
    // An all-gather before and a reduce-scatter behind each of the two sub-layers.
    tensor += passes * 4 * others(l.tp) * per_cp * D * kBf16;
    if (config_.is_moe(i)) {  // dispatch and combine of k rows a token
      const double width = positive(config_.moe.latent > 0 ? config_.moe.latent : config_.hidden);
      expert += passes * 2 * others(l.ep) * per_gpu * positive(config_.moe.experts_per_token) * width * kBf16;
    }
    if (config_.kda_layer[i]) {  // every rank's transition and state go to all others
      const double K = positive(config_.kda.head_dim), H = positive(config_.kda.heads) / positive(l.tp);
      context += passes * positive(l.cp - 1) * H * K * 2 * K * 4.0;
    } else {  // latent rows around the ring; their gradients back
      const double row = positive(config_.mla.kv_lora_rank + config_.mla.rope_dim) * kBf16;
      context += (passes + 1) * positive(l.cp - 1) * per_cp * row;
    }
  }
  const auto set = [&](Traffic kind, double bytes, int64_t group, int64_t stride) {
    plan.sent_bytes[static_cast<size_t>(kind)] = bytes;
    plan.sent_seconds[static_cast<size_t>(kind)] = seconds(bytes, group, stride);
  };
  set(Traffic::kTensor, tensor * micro, l.tp, 1);
  set(Traffic::kExpert, expert * micro, l.ep, 1);
  set(Traffic::kContext, context * micro, l.cp, l.tp);
  if (l.pp > 1) {  // the live sum and the blocks that ended in this stage, and their gradients back
    const int64_t block =
        config_.attn_res == AttnResKind::kBlock ? config_.attn_res_block : config_.layers + 1;
    const double tensors = 1 + positive(end / block - begin / block);
    set(Traffic::kPipeline, micro * 2 * tensors * per_gpu * D * kBf16, l.pp, l.tp * l.cp * l.dp);
  }
  // Gradients reduced and scattered, weights gathered: once a step.
  Size size;
  for (int64_t i = begin; i < end; ++i) size += sizes_.layers[i];
  const int64_t copies = l.dp * l.cp, expert_copies = l.gpus() / (l.pp * l.ep);
  const double dense = 2 * others(copies) * (size.split / positive(l.tp) + size.whole);
  const double experts = 2 * others(expert_copies) * size.experts / positive(l.ep);
  const auto data = static_cast<size_t>(Traffic::kData);
  plan.sent_bytes[data] = dense + experts;
  plan.sent_seconds[data] = seconds(dense, copies, l.tp) + seconds(experts, expert_copies, l.ep);
}

ClusterPlan Planner::evaluate(const Layout& l) const {
  ClusterPlan plan;
  plan.layout = l;
  plan.micro_batches = micro_batches(l);
  plan.batch_tokens = plan.micro_batches * l.dp * o_.context;
  for (int64_t stage = 0; stage < l.pp; ++stage) {
    const GpuMemory m = stage_memory(l, stage, std::min(l.pp - stage, plan.micro_batches));
    if (m.total() <= plan.memory.total()) continue;
    plan.memory = m;
    plan.fullest_stage = stage;
  }
  communicate(plan);
  const double micro = positive(plan.micro_batches);
  plan.bubble = positive(l.pp - 1) / (micro + positive(l.pp - 1));
  plan.step_flops = flops_ * positive(plan.batch_tokens);
  const double at_mfu = plan.step_flops / (positive(l.gpus()) * o_.gpu.flops * o_.mfu);
  plan.communication_bound = plan.communication_s() > at_mfu;
  plan.step_time_s = std::max(at_mfu, plan.communication_s());
  if (o_.tokens > 0) {
    plan.steps = (o_.tokens + plan.batch_tokens - 1) / plan.batch_tokens;
    plan.seconds = positive(plan.steps) * plan.step_time_s;
    plan.gpu_hours = plan.seconds / 3600.0 * positive(l.gpus());
    plan.cost = plan.gpu_hours * o_.price;
  }
  return plan;
}

// Every possible layout of `gpus` GPUs that agrees with the axes given. TP stays inside a host.
std::vector<Layout> Planner::layouts(int64_t gpus, const ClusterOptions& given) const {
  const auto choices = [](int64_t fixed, int64_t most, bool powers_only) {
    std::vector<int64_t> out;
    if (fixed > 0) return std::vector<int64_t>{fixed};
    for (int64_t n = 1; n <= most; n = powers_only ? n * 2 : n + 1) out.push_back(n);
    return out;
  };
  std::vector<Layout> out;
  for (const int64_t tp : choices(given.tp, std::min(o_.gpu.per_host, gpus), true)) {
    for (const int64_t pp : choices(given.pp, std::min<int64_t>(64, gpus / tp), true)) {
      for (const int64_t cp : choices(given.cp, std::min<int64_t>(64, gpus / (tp * pp)), true)) {
        const int64_t dp = given.dp > 0 ? given.dp : gpus / (tp * pp * cp);
        if (dp < 1 || tp * pp * cp * dp != gpus) continue;
        for (const int64_t ep : choices(given.ep, gpus / pp, /*powers_only=*/false)) {
          if (std::max<int64_t>(config_.moe.experts, 1) % ep != 0) continue;
          const Layout l{.tp = tp, .pp = pp, .cp = cp, .ep = ep, .dp = dp};
          if (fault(l, gpus).empty()) out.push_back(l);
        }
      }
    }
  }
  return out;
}

template <class Cost>
std::optional<ClusterPlan> Planner::best(int64_t gpus, const ClusterOptions& given, const Cost& cost) const {
  std::optional<ClusterPlan> found;
  double least = 0;
  for (const Layout& l : layouts(gpus, given)) {
    const ClusterPlan plan = evaluate(l);
    if (!fits(plan)) continue;
    const double c = cost(plan);
    if (found && c >= least) continue;
    found = plan;
    least = c;
  }
  return found;
}

// Seconds that communication and bubbles would add to a token if nothing hid them.
double overhead(const ClusterPlan& plan) {
  return (plan.communication_s() + plan.bubble * plan.step_time_s) / positive(plan.batch_tokens) *
         positive(plan.layout.gpus());
}

std::optional<ClusterPlan> Planner::smallest(const ClusterOptions& given) const {
  constexpr int64_t kMost = 1 << 17;
  for (int64_t gpus = 1; gpus <= kMost; gpus *= 2)
    if (const auto plan = best(gpus, given, overhead)) return plan;
  return std::nullopt;
}

double distance(const Layout& a, const Layout& b) {
  const auto apart = [](int64_t x, int64_t y) { return std::abs(std::log2(positive(x) / positive(y))); };
  return apart(a.tp, b.tp) + apart(a.pp, b.pp) + apart(a.cp, b.cp) + apart(a.ep, b.ep);
}

std::string gib(double bytes) {
  return fmt::format("{:.1f} GiB", bytes / (1 << 30));
}

[[noreturn]] void refuse(const Planner& planner, const ClusterPlan& asked, const ClusterOptions& o) {
  ClusterOptions free = o;
  free.tp = free.pp = free.cp = free.ep = free.dp = 0;
  const auto near = planner.best(asked.layout.gpus(), free,
                                 [&](const ClusterPlan& p) { return distance(p.layout, asked.layout); });
  auto found = near ? near : planner.smallest(free);
  // A count that only does not divide: the largest below it that the smallest cluster does divide.
  if (found && !near && found->layout.gpus() < asked.layout.gpus()) {
    Layout l = found->layout;
    l.dp = asked.layout.gpus() / (l.tp * l.pp * l.cp);
    if (planner.fault(l, l.gpus()).empty()) found = planner.evaluate(l);
  }
  const std::string what =
      fmt::format("{} needs {} a GPU in pipeline stage {}, there are {}", asked.layout.text(),
                  gib(asked.memory.total()), asked.fullest_stage, gib(o.gpu.memory_bytes));
  if (!found) fail("does not fit: {}; no cluster of up to 131072 such GPUs holds it", what);
  fail("does not fit: {}; the nearest that does: {} GPUs with {} ({} a GPU)", what, found->layout.gpus(),
       found->layout.text(), gib(found->memory.total()));
}

}  // namespace

std::string Layout::text() const {
  return fmt::format("TP {}, PP {}, CP {}, EP {}, DP {}", tp, pp, cp, ep, dp);
}

double ClusterPlan::communication_s() const {
  double sum = 0;
  for (const double s : sent_seconds) sum += s;
  return sum;
}

ClusterPlan plan_cluster(const ModelConfig& config, const ClusterOptions& options) {
  check(options.gpus >= 1, "a cluster needs at least one GPU, got {}", options.gpus);
  check(options.context >= 1, "expected a context of at least one token, got {}", options.context);
  check(options.mfu > 0 && options.mfu <= 1, "MFU: expected a share above 0 and up to 1, got {}",
        options.mfu);
  const Planner planner(config, options);
  const bool given = options.tp > 0 || options.pp > 0 || options.cp > 0 || options.ep > 0 || options.dp > 0;
  if (!given) {
    if (const auto base = planner.smallest(options)) {
      Layout l = base->layout;
      l.dp = options.gpus / (l.tp * l.pp * l.cp);
      if (planner.fault(l, options.gpus).empty() && planner.fits(planner.evaluate(l)))
        return planner.evaluate(l);
    }
  }
  if (const auto plan = planner.best(options.gpus, options, overhead)) return *plan;
  // Nothing fits: say why of the layout asked for, the axes left open as the least memory has them.
  std::optional<ClusterPlan> asked;
  for (const Layout& l : planner.layouts(options.gpus, options)) {
    const ClusterPlan plan = planner.evaluate(l);
    if (!asked || plan.memory.total() < asked->memory.total()) asked = plan;
  }
  if (asked) refuse(planner, *asked, options);
  const auto or_one = [](int64_t n) { return std::max<int64_t>(n, 1); };
  Layout l{.tp = or_one(options.tp),
           .pp = or_one(options.pp),
           .cp = or_one(options.cp),
           .ep = or_one(options.ep),
           .dp = 1};
  l.dp = options.dp > 0 ? options.dp : or_one(options.gpus / l.gpus());
  const std::string why = planner.fault(l, options.gpus);
  fail("impossible layout: {}", why.empty() ? l.text() + " cannot be completed" : why);
}

}  // namespace godwit
