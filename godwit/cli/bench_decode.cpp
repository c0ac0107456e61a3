// `godwit bench decode`: tokens a second of a model's prompts and steps, beside the least bytes a step moves.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "bench/kda_timing.h"
#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/cli/bench_model.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/op_profile.h"
#include "godwit/cli/support.h"
#include "godwit/infer/decode_graph.h"
#include "godwit/infer/memory.h"
#include "godwit/model/forward.h"

namespace godwit::cli {
namespace {

using nlohmann::json;

at::ScalarType dtype_of(const LoadedModel& model) {
  return model.weights.embed.scalar_type();
}

void wait_for(at::Device device) {
  if (!device.is_cpu()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
}

template <class Fn>
double seconds_of(at::Device device, const Fn& fn) {
  wait_for(device);
  const auto start = std::chrono::steady_clock::now();
  fn();
  wait_for(device);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

at::Tensor random_ids(const LoadedModel& model, int64_t count) {
  return at::randint(model.config.vocab_size, {count}, at::kLong).to(model.device);
}

at::Tensor next_ids(const LoadedModel& model, const at::Tensor& hidden) {
  return ops::linear(hidden, head_weight(model.config, model.weights)).argmax(-1);
}

// The least bytes of one step: every weight of the step once, of the experts those that some sequence chose
// (even routing), the KDA states read and written, the latent rows read.
double step_bytes(LoadedModel& model, at::ScalarType latents, int64_t batch, int64_t cached) {
  const ModelConfig& c = model.config;
  double experts = 0, others = 0;
  for_each_param(c, model.weights, [&](const ParamInfo& info, at::Tensor& value) {
    const auto bytes = static_cast<double>(info.is_matrix ? as_matrix(info, value).bytes()
                                                          : static_cast<int64_t>(value.nbytes()));
    if (info.role == ParamRole::kExperts) {
      experts += bytes;
    } else if (info.role != ParamRole::kEmbedding || c.tie_embeddings) {
      others += bytes;
    }
  });
  const double chosen =
      c.moe.experts > 0 ? static_cast<double>(c.moe.experts_per_token) / static_cast<double>(c.moe.experts)
                        : 0;
  const double touched = 1 - std::pow(1 - chosen, static_cast<double>(batch));
  const auto slots = static_cast<double>(batch * ModelState::slot_bytes(c, dtype_of(model)));
  const double row = static_cast<double>(ModelState::page_bytes(c, latents)) / kLatentPage;
  const int64_t seen = c.mla.window > 0 ? std::min(c.mla.window, cached) : cached;
  return others + experts * touched + 2 * slots + row * static_cast<double>(batch * (seen + 1));
}

// Feeds `ids` to sequence n in pieces as the engine does; the last piece's hidden rows.
at::Tensor read_prompt(const LoadedModel& model, const BenchDecodeArgs& args, const at::Tensor& ids,
                       int64_t n, ModelState& state) {
  const int64_t tokens = ids.size(0),
                most = args.piece > 0 ? args.piece : default_prefill_tokens(model.device);
  at::Tensor hidden;
  for (int64_t at = 0; at < tokens; at += most) {
    const int64_t piece = std::min(most, tokens - at);
    hidden = forward_hidden(
        model.config, model.weights,
        {.ids = ids.narrow(0, at, piece), .cu_seqlens = make_cu_seqlens({piece}), .sequences = {n}}, &state);
  }
  return hidden;
}

// Sequences that have seen `cached` tokens.
void fill_state(const LoadedModel& model, const BenchDecodeArgs& args, int64_t batch, int64_t cached,
                ModelState& state) {
  if (args.synthetic) {
    for (LayerState& layer : state.layers()) {
      if (layer.pages.defined() && args.fp8_latents)
        layer.pages.view(at::kByte).random_(0x38);  // below 1
      else if (layer.pages.defined() && layer.pages.numel() > 0)
        layer.pages.normal_(0, 0.5);
      if (layer.kda.recurrent.defined()) layer.kda.recurrent.normal_(0, 0.05);
    }
    for (int64_t n = 0; n < batch; ++n) state.advance(n, cached);
    return;
  }
  for (int64_t n = 0; n < batch; ++n) read_prompt(model, args, random_ids(model, cached), n, state);
}

json time_decode(LoadedModel& model, const BenchDecodeArgs& args, int64_t batch, int64_t cached,
                 double bandwidth) {
  const int64_t most = cached + args.steps * (args.repeats + 1) + (args.profile ? 1 : 0);
  // Recorded steps have a sequence of their own for padding.
  const bool graphs = DecodeGraphs::supports(model.config, model.device, dtype_of(model));
  const int64_t pages = batch * ((most + kLatentPage - 1) / kLatentPage) + (graphs ? 1 : 0);
  ModelState state(model.config,
                   {.sequences = batch + (graphs ? 1 : 0), .pages = pages, .fp8_latents = args.fp8_latents},
                   model.device, dtype_of(model));
  for (int64_t n = 0; n < batch; ++n) check(state.reserve(n, most), "bench decode: no room in the state");
  fill_state(model, args, batch, cached, state);
  at::Tensor ids = random_ids(model, batch);
  const at::Tensor each = make_cu_seqlens(std::vector<int64_t>(batch, 1));
  std::unique_ptr<DecodeGraphs> recorded;
  if (graphs)
    recorded = std::make_unique<DecodeGraphs>(model.config, model.weights, state,
                                              DecodeGraphs::Options{.max_context = most});
  std::vector<int64_t> sequences(batch);
  std::iota(sequences.begin(), sequences.end(), 0);
  const auto step = [&] {
    if (recorded) {
      const at::Tensor host = ids.to(at::kCPU);
      const std::vector<int64_t> tokens(host.data_ptr<int64_t>(), host.data_ptr<int64_t>() + batch);
      const at::Tensor logits = recorded->step(tokens, sequences);
      check(logits.defined(), "bench decode: the step could not be recorded");
      ids = logits.argmax(-1);
    } else {
      ids = next_ids(model, forward_hidden(model.config, model.weights,
                                           {.ids = ids, .cu_seqlens = each, .sequences = sequences}, &state));
    }
  };
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= args.repeats; ++i) {
    const double took = seconds_of(model.device, [&] {
      for (int64_t s = 0; s < args.steps; ++s) step();
    });
    if (i > 0) best = std::min(best, took / static_cast<double>(args.steps));
  }
  const double bytes = step_bytes(model, args.fp8_latents ? kFp8Latent : dtype_of(model), batch, cached);
  json out = {{"batch", batch},
              {"cached", cached},
              {"step_ms", best * 1e3},
              {"tokens_per_s", static_cast<double>(batch) / best},
              {"state_bytes", state.bytes()},
              {"graph", recorded != nullptr},
              {"step_bytes", bytes},
              {"times_floor", best * bandwidth / bytes}};
  if (args.profile) {
    const OpProfile profile = profile_ops(model.device, step);
    if (!args.json) print_profile(fmt::format("a step of {} after {}", batch, cached), profile);
    out["profile"] = profile_json(profile);
  }
  return out;
}

json time_prefill(const LoadedModel& model, const BenchDecodeArgs& args) {
  const int64_t tokens = args.prefill;
  ModelState state(
      model.config,
      {.sequences = 1, .pages = (tokens + kLatentPage - 1) / kLatentPage, .fp8_latents = args.fp8_latents},
      model.device, dtype_of(model));
  const at::Tensor ids = random_ids(model, tokens);
  const auto read = [&] {
    state.clear(0);
    next_ids(model, read_prompt(model, args, ids, 0, state).slice(0, -1));
  };
  double best = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= args.repeats; ++i) {
    const double took = seconds_of(model.device, read);
    if (i > 0) best = std::min(best, took);
  }
  json out = {{"tokens", tokens}, {"ms", best * 1e3}, {"tokens_per_s", static_cast<double>(tokens) / best}};
  if (args.profile) {
    const OpProfile profile = profile_ops(model.device, read);
    if (!args.json) print_profile("the prompt once", profile);
    out["profile"] = profile_json(profile);
  }
  return out;
}

}  // namespace

int run_bench_decode(const BenchDecodeArgs& args) {
  const at::NoGradGuard no_grad;
  LoadedModel model = open_bench_model(args.model, args.dtype, args.weights, args.device);
  const double bandwidth = bench::copy_bandwidth(model.device);
  json out = {{"device", model.device.str()},
              {"dtype", dtype_of(model) == at::kFloat ? "f32" : "bf16"},
              {"weights", args.weights.empty() ? "as dtype" : args.weights},
              {"weight_bytes", weight_bytes(model.config, model.weights)},
              {"copy_bytes_per_s", bandwidth},
              {"synthetic", args.synthetic},
              {"threads", num_threads()},
              {"decode", json::array()}};
  if (args.prefill > 0) out["prefill"] = time_prefill(model, args);
  for (const int64_t cached : args.cached) {
    for (const int64_t batch : args.batch)
      out["decode"].push_back(time_decode(model, args, batch, cached, bandwidth));
  }
  if (args.json) {
    print_json(out);
    return 0;
  }
  print_out("{}, {} (weights {}, {}), copy {:.1f} GB/s\n", args.model, out["dtype"].get<std::string>(),
            out["weights"].get<std::string>(), human_bytes(out["weight_bytes"].get<double>()),
            bandwidth * 1e-9);
  if (args.prefill > 0) {
    print_out("  prefill {} tokens {:>10.1f} ms {:>10.0f} tokens/s\n", args.prefill,
              out["prefill"]["ms"].get<double>(), out["prefill"]["tokens_per_s"].get<double>());
  }
  print_out("  {:>6} {:>9} {:>10} {:>11} {:>12} {:>12}\n", "batch", "cached", "ms a step", "tokens/s",
            "state", "times floor");
  for (const json& row : out["decode"]) {
    print_out("  {:>6} {:>9} {:>10.3f} {:>11.0f} {:>12} {:>12.2f}\n", row["batch"].get<int64_t>(),
              row["cached"].get<int64_t>(), row["step_ms"].get<double>(), row["tokens_per_s"].get<double>(),
              human_bytes(row["state_bytes"].get<double>()), row["times_floor"].get<double>());
  }
  return 0;
}

}  // namespace godwit::cli
