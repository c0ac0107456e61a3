// `godwit bench train`: a training step of any configuration on random tokens, in parts, against the
// hardware.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/base/rng.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/memory.h"
#include "godwit/cli/op_profile.h"
#include "godwit/cli/random_weights.h"
#include "godwit/cli/support.h"
#include "godwit/data/token_shard.h"
#include "godwit/dist/group.h"
#include "godwit/model/config_keys.h"
#include "godwit/model/forward.h"
#include "godwit/ops/block_pool.h"
#include "godwit/ops/ops.h"
#include "godwit/plan/plan.h"
#include "godwit/train/setup.h"
#include "godwit/train/step.h"

namespace godwit::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kHopperPeak = 989e12;  // bf16, dense

void wait_for(c10::Device device) {
  if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
}

struct Times {
  double best_ms = 0, median_ms = 0;
};

template <class Work>
Times measure(c10::Device device, int repeats, const Work& work) {
  std::vector<double> ms;
  for (int i = 0; i < repeats + 2; ++i) {  // the first two warm up
    wait_for(device);
    const auto begin = std::chrono::steady_clock::now();
    work();
    wait_for(device);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    if (i >= 2) ms.push_back(took.count());
  }
  std::sort(ms.begin(), ms.end());
  return {ms.front(), ms[ms.size() / 2]};
}

// Random documents as long as the sequences, in a directory that goes with the object.
class RandomData {
 public:
  RandomData(int64_t vocab_size, int64_t sequences, int64_t length) {
    std::string name = (fs::temp_directory_path() / "godwit-bench-XXXXXX").string();
    check(mkdtemp(name.data()) != nullptr, "{}: cannot make a directory there", name);
    directory_ = name;
    data::Manifest manifest{"random", vocab_size, 0, {}, {}};
    data::ShardWriter writer(directory_ / "shard-00000.gwt", vocab_size);
    uint64_t counter = 0;
    std::vector<int32_t> ids(static_cast<size_t>(length));
    for (int64_t s = 0; s < 2 * sequences; ++s) {
      for (int32_t& id : ids)
        id = static_cast<int32_t>(random_bits(1, 0, counter++) % static_cast<uint64_t>(vocab_size));
      writer.add_document(ids, static_cast<uint64_t>(length));
    }
    manifest.shards.push_back(writer.finish());
    data::write_manifest(directory_, manifest);
  }
  ~RandomData() {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  const fs::path& directory() const { return directory_; }

 private:
  fs::path directory_;
};

// Of the random data, as a new model takes its vocabulary from them: the configuration's.
int64_t vocabulary_of(const BenchTrainArgs& args) {
  const json overrides = json::parse(args.override_json, nullptr, /*allow_exceptions=*/false);
  check(overrides.is_object(), "--override: expected a JSON object");
  const std::string unknown = unknown_config_key(overrides);
  check(unknown.empty(), "--override: {} is no key of a model's configuration", unknown);
  const auto given = overrides.find("vocab_size");
  if (given == overrides.end()) return load_model_config(args.model).vocab_size;
  check(given->is_number_integer() && *given > kSpecialTokens,
        "--override: vocab_size must be above {}, got {}", kSpecialTokens, given->dump());
  return given->get<int64_t>();
}

Recipe bench_recipe(const BenchTrainArgs& args, const fs::path& data) {
  Recipe recipe;
  recipe.model = {.name = args.model, .override_json = args.override_json};
  recipe.data = {{.name = "random", .path = data.string()}};
  recipe.train.dtype = args.dtype == "f32" ? TrainDtype::kF32 : TrainDtype::kBf16;
  recipe.train.recompute = args.recompute ? Recompute::kBlock : Recompute::kNone;
  StageOptions stage;
  stage.name = "bench";
  stage.context = args.tokens / args.sequences;
  stage.batch_tokens = args.tokens;
  stage.steps = 1;
  recipe.stages = {stage};
  return recipe;
}

double gemm_rate(c10::Device device) {
  const auto options = at::TensorOptions(at::kBFloat16).device(device);
  const at::Tensor a = at::randn({8192, 8192}, options), b = at::randn({8192, 8192}, options);
  const Times t = measure(device, 20, [&] { at::mm(a, b); });
  return 2.0 * 8192 * 8192 * 8192 / t.best_ms * 1e3;
}

// The model and the pieces of a step that are timed.
struct Work {
  const Recipe& recipe;
  const ModelConfig& config;
  ModelWeights& weights;
  PackedBatch batch;
  at::Tensor targets;

  at::Tensor loss() {
    ForwardOptions options;
    options.recompute = recipe.train.recompute == Recompute::kBlock;
    const at::Tensor hidden = forward_hidden(config, weights, batch, nullptr, options);
    const at::Tensor weight =
        at::full({hidden.size(0)}, 1.0 / hidden.size(0), hidden.options().dtype(at::kFloat));
    return std::get<0>(ops::linear_cross_entropy(hidden, head_weight(config, weights), targets, weight));
  }
  void forward() {
    const at::NoGradGuard no_grad;
    forward_hidden(config, weights, batch);
  }
  void forward_backward() {
    loss().backward();
    for_each_param(config, weights,
                   [](const ParamInfo&, at::Tensor& value) { value.mutable_grad() = at::Tensor(); });
  }
};

json time_json(const Times& t, double tokens, double flops_per_token, bool gpu) {
  json out = {{"ms", t.best_ms}, {"median_ms", t.median_ms}, {"tokens_per_s", tokens / t.best_ms * 1e3}};
  out["flops_per_s"] = tokens * flops_per_token / t.best_ms * 1e3;
  if (gpu) out["mfu"] = out["flops_per_s"].get<double>() / kHopperPeak;
  return out;
}

void print_row(const char* name, const json& row) {
  print_out("  {:<20} {:>10.2f} ms  {:>10.0f} tokens/s  {:>8.2f} TFLOP/s{}\n", name, row["ms"].get<double>(),
            row["tokens_per_s"].get<double>(), row["flops_per_s"].get<double>() * 1e-12,
            row.contains("mfu") ? fmt::format("  {:.1f} % of 989", 100 * row["mfu"].get<double>()) : "");
}

}  // namespace

int run_bench_train(const BenchTrainArgs& args) {
  const c10::Device device = apply_device(args.device);
  check(args.tokens % args.sequences == 0, "--tokens {} is not a multiple of --sequences {}", args.tokens,
        args.sequences);
  const bool gpu = !device.is_cpu();
  if (!gpu) ops::use_block_pool();  // as run_training does
  const RandomData random(vocabulary_of(args), args.sequences, args.tokens / args.sequences);
  const Recipe recipe = bench_recipe(args, random.directory());
  const RunData data = open_data(recipe);
  const ModelConfig config = stage_config(resolve_model(recipe, data), recipe.stages[0]);
  const at::ScalarType dtype = args.dtype == "f32" ? at::kFloat : at::kBFloat16;
  ModelWeights weights = random_weights(config, device, dtype);
  const Plan plan = make_plan(config, recipe.stages[0].context);
  const auto loader = stage_loader(recipe, data, 0);

  const data::PackedBatch packed = loader->batch(0);
  const auto on_device = [&](const std::vector<int64_t>& v) { return at::tensor(v, at::kLong).to(device); };
  Work work{.recipe = recipe,
            .config = config,
            .weights = weights,
            .batch = {.ids = on_device(packed.ids), .cu_seqlens = at::tensor(packed.cu_seqlens, at::kLong)},
            .targets = on_device(packed.targets)};
  const double tokens = static_cast<double>(args.tokens);
  json out = {{"device", device.str()},
              {"dtype", args.dtype},
              {"threads", num_threads()},
              {"model", args.model},
              {"parameters", plan.parameters.total - plan.parameters.vision},
              {"active_parameters", plan.parameters.active},
              {"tokens", args.tokens},
              {"sequences", args.sequences},
              {"recompute", args.recompute}};
  if (gpu) out["gemm_flops_per_s"] = gemm_rate(device);
  // As a prompt is read: without the logits of every token.
  const double head_flops = 2.0 * static_cast<double>(config.vocab_size) * static_cast<double>(config.hidden);
  out["forward"] = time_json(measure(device, args.repeats, [&] { work.forward(); }), tokens,
                             plan.flops.prefill - head_flops, gpu);
  set_requires_grad(config, weights, true);
  out["forward_backward"] = time_json(measure(device, args.repeats, [&] { work.forward_backward(); }), tokens,
                                      plan.flops.train, gpu);
  out["peak_bytes_forward_backward"] = peak_memory(device);
  std::optional<OpProfile> profile;  // printed: of the whole step where there is one
  if (args.profile) {
    profile = profile_ops(device, [&] { work.forward_backward(); });
    out["profile"] = profile_json(*profile);
  }
  if (args.optimizer) {
    dist::Group alone;
    TrainStep step(recipe, config, weights, device, alone);
    int64_t batch = 0;
    const Times t = measure(device, args.repeats, [&] {
      const StepResult r = step.run({.config = config, .loader = *loader, .batch = batch++});
      check(r.fault == StepFault::kNone, "step {}: {}", batch, r.what);
    });
    if (args.profile) {
      profile =
          profile_ops(device, [&] { step.run({.config = config, .loader = *loader, .batch = batch++}); });
      out["profile_step"] = profile_json(*profile);
    }
    out["step"] = time_json(t, tokens, plan.flops.train, gpu);
    out["peak_bytes_step"] = peak_memory(device);
  }
  if (args.json) {
    print_json(out);
    return 0;
  }
  print_out("{}, {} parameters ({} active), {} tokens in {} sequence(s), {} on {}\n", args.model,
            human_count(out["parameters"].get<double>()), human_count(out["active_parameters"].get<double>()),
            args.tokens, args.sequences, args.dtype, device.str());
  if (gpu)
    print_out("  a bf16 product of 8,192 cubed runs at {:.0f} TFLOP/s\n",
              out["gemm_flops_per_s"].get<double>() * 1e-12);
  print_row("forward", out["forward"]);
  print_row("forward, backward", out["forward_backward"]);
  if (out.contains("step")) print_row("whole step", out["step"]);
  print_out("  peak memory {}\n", human_bytes(peak_memory(device)));
  if (profile) print_profile("one pass, or step", *profile);
  return 0;
}

}  // namespace godwit::cli
