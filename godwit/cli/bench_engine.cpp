// `godwit bench engine`: many requests at once through the inference engine: throughput, latencies, and
// whether the answers are what they should be.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/base/rng.h"
#include "godwit/cli/bench_model.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/memory.h"
#include "godwit/cli/support.h"
#include "godwit/infer/memory.h"
#include "godwit/model/forward.h"

namespace godwit::cli {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kPromptStream = 0x70726f6d7074;  // "prompt"

struct Answer {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
  std::vector<Clock::time_point> times;
  Finish finish;
};

std::vector<int32_t> random_tokens(const LoadedModel& model, int64_t count, uint64_t seed) {
  std::vector<int32_t> out(count);
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<int32_t>(random_bits(seed, kPromptStream, static_cast<uint64_t>(i)) %
                                  static_cast<uint64_t>(model.tokenizer.ranks()));
  return out;
}

// Pieces of a text, each from a place of its own; answers are greedy.
std::vector<Request> text_requests(const LoadedModel& model, const BenchEngineArgs& args) {
  const std::vector<int32_t> tokens = model.tokenizer.encode(read_file(args.text));
  const auto size = static_cast<int64_t>(tokens.size());
  check(size > args.prompt, "bench engine: {} has {} tokens, prompts need {}", args.text, size, args.prompt);
  std::vector<Request> out;
  for (int64_t i = 0; i < args.requests; ++i) {
    const auto from = static_cast<int64_t>(random_bits(1, kPromptStream, static_cast<uint64_t>(i)) %
                                           static_cast<uint64_t>(size - args.prompt));
    out.push_back({.prompt = {tokens.begin() + from, tokens.begin() + from + args.prompt},
                   .sampling = {.temperature = 0.0},
                   .max_tokens = args.tokens});
  }
  return out;
}

// Prompts of half to one and a half times args.prompt tokens. Every second begins with the same half of
// args.prompt; every third says a part of itself again and again, so that there is something to draft.
std::vector<Request> make_requests(const LoadedModel& model, const BenchEngineArgs& args) {
  const std::vector<int32_t> common = random_tokens(model, args.prompt / 2, 1);
  std::vector<Request> out;
  for (int64_t i = 0; i < args.requests; ++i) {
    const int64_t length = std::max<int64_t>(1, args.prompt / 2 + 37 * i % std::max<int64_t>(1, args.prompt));
    std::vector<int32_t> prompt = random_tokens(model, length, static_cast<uint64_t>(i) + 2);
    if (i % 2 == 0)
      std::copy_n(common.begin(), std::min<size_t>(common.size(), prompt.size()), prompt.begin());
    if (i % 3 == 0) {
      for (size_t t = 12; t < prompt.size(); ++t) prompt[t] = prompt[t % 12];
    }
    out.push_back({.prompt = std::move(prompt),
                   .sampling = {.temperature = i % 3 == 0 ? 0.0 : 1.0, .seed = static_cast<uint64_t>(i)},
                   .max_tokens = args.tokens});
  }
  return out;
}

EngineOptions engine_options(const LoadedModel& model, const BenchEngineArgs& args) {
  return {.max_sequences = args.max_sequences,
          .max_context = std::min(context_limit(model.config), 2 * args.prompt + args.tokens),
          .cache_tokens = args.cache_tokens,
          .draft_tokens = args.draft_tokens,
          .fp8_latents = args.fp8_latents,
          .graphs = args.graphs,
          .deterministic = args.deterministic,
          .memory_bytes = memory_budget(model.device)};
}

void submit(Engine& engine, Request request, Answer& answer) {
  request.on_token = [&answer](int64_t, const DrawnToken& token) {
    answer.ids.push_back(token.id);
    answer.logprobs.push_back(token.logprob);
    answer.times.push_back(Clock::now());
    return true;
  };
  request.on_finish = [&answer](int64_t, const Finish& finish) { answer.finish = finish; };
  engine.submit(std::move(request));
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

int64_t count_same(const std::vector<Answer>& a, const std::vector<Answer>& b, bool bits) {
  int64_t same = 0;
  for (size_t i = 0; i < a.size(); ++i)
    same += a[i].ids == b[i].ids && (!bits || a[i].logprobs == b[i].logprobs) ? 1 : 0;
  return same;
}

json quantiles_ms(const std::vector<double>& seconds) {
  return {{"p50", 1e3 * quantile(seconds, 0.5)},
          {"p99", 1e3 * quantile(seconds, 0.99)},
          {"most", 1e3 * quantile(seconds, 1)}};
}

// All requests at once; then the store must be as it was.
json run_together(Engine& engine, const std::vector<Request>& requests, std::vector<Answer>& answers) {
  const int64_t free = engine.stats().free_pages;
  const auto start = Clock::now();
  for (size_t i = 0; i < requests.size(); ++i) submit(engine, requests[i], answers[i]);
  engine.run_until_idle();
  const double took = std::chrono::duration<double>(Clock::now() - start).count();
  std::vector<double> first, between;
  int64_t drawn = 0, prompts = 0;
  for (const Answer& a : answers) {
    check(!failed(a.finish.reason), "bench engine: a request failed: {}", a.finish.error);
    drawn += static_cast<int64_t>(a.ids.size());
    prompts += a.finish.prompt_tokens;
    for (size_t t = 0; t < a.times.size(); ++t) {
      const auto before = t == 0 ? start : a.times[t - 1];
      (t == 0 ? first : between).push_back(std::chrono::duration<double>(a.times[t] - before).count());
    }
  }
  const EngineStats stats = engine.stats();
  engine.forget_prefixes();
  engine.step();  // publishes what is free now
  check(engine.stats().running == 0 && engine.stats().free_pages == free,
        "bench engine: {} of {} pages are free after all requests", engine.stats().free_pages, free);
  return {{"seconds", took},
          {"drawn_tokens", drawn},
          {"prompt_tokens", prompts},
          {"drawn_per_s", static_cast<double>(drawn) / took},
          {"tokens_per_s", static_cast<double>(drawn + prompts) / took},
          {"first_token_ms", quantiles_ms(first)},
          {"between_tokens_ms", quantiles_ms(between)},
          {"steps", stats.steps},
          {"cached_tokens", stats.cached_tokens},
          {"preempted", stats.preempted},
          {"drafted_tokens", stats.drafted_tokens},
          {"accepted_tokens", stats.accepted_tokens}};
}

// How many answers have the same bits when their request is alone in an engine, without a prefix to find.
json compare_alone(const LoadedModel& model, const BenchEngineArgs& args,
                   const std::vector<Request>& requests, const std::vector<Answer>& answers) {
  EngineOptions options = engine_options(model, args);
  options.cache_tokens = 2 * options.max_context;
  Engine engine(model, options);
  std::vector<Answer> alone(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    submit(engine, requests[i], alone[i]);
    engine.run_until_idle();
    engine.forget_prefixes();
  }
  return {{"answers", requests.size()},
          {"same_tokens", count_same(alone, answers, /*bits=*/false)},
          {"same_bits", count_same(alone, answers, /*bits=*/true)}};
}

// The same requests through an engine that drafts nothing.
json compare_undrafted(const LoadedModel& model, BenchEngineArgs args, const std::vector<Request>& requests,
                       const std::vector<Answer>& answers) {
  args.draft_tokens = 0;
  Engine engine(model, engine_options(model, args));
  std::vector<Answer> plain(requests.size());
  if (!model.device.is_cpu()) {
    std::vector<Answer> warm(requests.size());
    run_together(engine, requests, warm);
  }
  const json run = run_together(engine, requests, plain);
  return {{"seconds", run["seconds"]},
          {"drawn_per_s", run["drawn_per_s"]},
          {"between_tokens_ms", run["between_tokens_ms"]},
          {"same_tokens", count_same(plain, answers, /*bits=*/false)},
          {"same_bits", count_same(plain, answers, /*bits=*/true)}};
}

// The drawn tokens' log-probabilities beside those of one forward call over prompt and answer, without a
// state.
json compare_forward(const LoadedModel& model, const std::vector<Request>& requests,
                     const std::vector<Answer>& answers) {
  std::vector<double> off;
  for (size_t i = 0; i < requests.size(); ++i) {
    std::vector<int64_t> ids(requests[i].prompt.begin(), requests[i].prompt.end());
    ids.insert(ids.end(), answers[i].ids.begin(), answers[i].ids.end());
    const auto drawn = static_cast<int64_t>(answers[i].ids.size());
    const auto size = static_cast<int64_t>(ids.size());
    const at::Tensor hidden = forward_hidden(
        model.config, model.weights, {at::tensor(ids, at::kLong).to(model.device), make_cu_seqlens({size})});
    const at::Tensor logits =
        ops::linear(hidden.narrow(0, size - drawn - 1, drawn), head_weight(model.config, model.weights));
    const at::Tensor logprobs = logits.to(at::kFloat).log_softmax(1).to(at::kCPU);
    for (int64_t t = 0; t < drawn; ++t)
      off.push_back(std::abs(logprobs[t][answers[i].ids[t]].item<double>() - answers[i].logprobs[t]));
  }
  double sum = 0;
  for (const double x : off) sum += x;
  return {{"mean", off.empty() ? 0 : sum / static_cast<double>(off.size())},
          {"p99", quantile(off, 0.99)},
          {"most", quantile(off, 1)}};
}

// Of log-probabilities, on average. A router of random weights turns roundings of 16 bits into other experts,
// layer after layer, until nothing is left to compare.
double largest_difference(const LoadedModel& model, const BenchEngineArgs& args) {
  const bool experts = std::any_of(model.weights.layers.begin(), model.weights.layers.end(),
                                   [](const LayerWeights& layer) { return layer.moe.has_value(); });
  const bool fp32 = model.weights.embed.scalar_type() == at::kFloat;
  if (experts && (!fp32 || args.fp8_latents)) return std::numeric_limits<double>::infinity();
  return args.fp8_latents ? 0.1 : fp32 ? 1e-3 : 0.03;
}

void print_result(const json& out) {
  const auto number = [](const json& value) { return value.get<double>(); };
  print_out("{} requests, {} at once: {:.2f} s, {:.0f} tokens/s drawn, {:.0f} with the prompts, {} steps\n",
            out["requests"].get<int64_t>(), out["max_sequences"].get<int64_t>(), number(out["seconds"]),
            number(out["drawn_per_s"]), number(out["tokens_per_s"]), out["steps"].get<int64_t>());
  for (const char* key : {"first_token_ms", "between_tokens_ms"}) {
    print_out("  {:<18} p50 {:>9.2f} p99 {:>9.2f} most {:>9.2f}\n", key, number(out[key]["p50"]),
              number(out[key]["p99"]), number(out[key]["most"]));
  }
  print_out("  from the prefix cache {} of {} prompt tokens, preempted {}, drafts accepted {} of {}\n",
            out["cached_tokens"].get<int64_t>(), out["prompt_tokens"].get<int64_t>(),
            out["preempted"].get<int64_t>(), out["accepted_tokens"].get<int64_t>(),
            out["drafted_tokens"].get<int64_t>());
  if (out.contains("undrafted")) {
    const json& plain = out["undrafted"];
    print_out(
        "  without drafts: {:.2f} s, {:.0f} tokens/s drawn, between tokens p50 {:.2f} ms; {} answers have "
        "the same "
        "tokens, {} the same bits\n",
        number(plain["seconds"]), number(plain["drawn_per_s"]), number(plain["between_tokens_ms"]["p50"]),
        plain["same_tokens"].get<int64_t>(), plain["same_bits"].get<int64_t>());
  }
  if (!out.contains("alone")) return;
  print_out("  alone: {} of {} answers have the same tokens, {} the same bits\n",
            out["alone"]["same_tokens"].get<int64_t>(), out["alone"]["answers"].get<int64_t>(),
            out["alone"]["same_bits"].get<int64_t>());
  print_out(
      "  log-probabilities beside one forward call: off by {:.2e} on average, p99 {:.2e}, most {:.2e}\n",
      number(out["forward"]["mean"]), number(out["forward"]["p99"]), number(out["forward"]["most"]));
}

}  // namespace

int run_bench_engine(const BenchEngineArgs& args) {
  const at::NoGradGuard no_grad;
  const LoadedModel model = open_bench_model(args.model, args.dtype, args.weights, args.device);
  const std::vector<Request> requests =
      args.text.empty() ? make_requests(model, args) : text_requests(model, args);
  std::vector<Answer> answers(requests.size());
  json out;
  {
    Engine engine(model, engine_options(model, args));
    if (!model.device.is_cpu()) {  // records the graphs
      std::vector<Answer> warm(requests.size());
      run_together(engine, requests, warm);
    }
    const int64_t steps = engine.stats().steps;
    out = run_together(engine, requests, answers);
    out["steps"] = out["steps"].get<int64_t>() - steps;
  }
  out["requests"] = args.requests;
  out["max_sequences"] = args.max_sequences;
  bool right = true;
  if (args.check) {
    out["alone"] = compare_alone(model, args, requests, answers);
    out["forward"] = compare_forward(model, requests, answers);
    const bool fp32 = model.weights.embed.scalar_type() == at::kFloat;
    const bool exact = args.deterministic || (model.device.is_cpu() && fp32);
    right = (!exact || out["alone"]["same_bits"] == out["alone"]["answers"]) &&
            out["forward"]["mean"].get<double>() < largest_difference(model, args);
    if (args.draft_tokens > 0) {
      out["undrafted"] = compare_undrafted(model, args, requests, answers);
      right = right &&
              (!model.device.is_cpu() || !exact || out["undrafted"]["same_bits"] == out["alone"]["answers"]);
    }
  }
  if (args.json)
    print_json(out);
  else
    print_result(out);
  check(right, "bench engine: the answers are not what they should be");
  return 0;
}

}  // namespace godwit::cli
