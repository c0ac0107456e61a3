// The engine on a GPU, where steps are recorded. Skipped where there is none.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>

#include "godwit/infer/decode_graph.h"
#include "godwit/infer/engine.h"
#include "godwit/infer/memory.h"
#include "godwit/model/forward.h"
#include "tests/infer/bigram.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

// The tiny model in the widths that recorded steps take. Without experts roundings stay small; with them they
// choose others.
LoadedModel cuda_model(const std::string& weights, bool experts) {
  LoadedModel model = test::bigram_model({});
  ModelConfig& c = model.config;
  c.hidden = 128, c.intermediate = 128;
  c.initializer_range = 0.08;
  c.kda.head_dim = 128;
  c.mla.q_lora_rank = 64, c.mla.kv_lora_rank = 256, c.mla.nope_dim = c.mla.rope_dim = c.mla.v_dim = 64;
  c.moe.inner = c.moe.latent = 96;
  if (!experts) c.moe.first_dense = c.layers;
  validate(c, "cuda model");
  model.weights = init_weights(c, 5, at::kCPU, at::kFloat);
  pack_weights(c, model.weights, weight_format_of(weights));
  for_each_param(c, model.weights, [](const ParamInfo& info, at::Tensor& value) {
    if (info.is_matrix && as_matrix(info, value).packed()) {
      Matrix& w = as_matrix(info, value);
      w = Matrix(w.to(at::kCUDA), w.scale.to(at::kCUDA));
    } else {
      value = value.to(at::kCUDA, info.keep_fp32 ? at::kFloat : at::kBFloat16);
    }
  });
  model.device = at::Device(at::kCUDA, 0);
  return model;
}

struct Answer {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
  Finish finish;
  bool operator==(const Answer& other) const { return ids == other.ids && logprobs == other.logprobs; }
};

int64_t submit(Engine& engine, Request request, Answer& answer) {
  request.on_token = [&answer](int64_t, const DrawnToken& token) {
    answer.ids.push_back(token.id);
    answer.logprobs.push_back(token.logprob);
    return true;
  };
  request.on_finish = [&answer](int64_t, const Finish& finish) { answer.finish = finish; };
  return engine.submit(std::move(request));
}

Answer alone(const LoadedModel& model, const Request& request, const EngineOptions& options) {
  Engine engine(model, options);
  Answer answer;
  submit(engine, request, answer);
  engine.run_until_idle();
  return answer;
}

std::vector<int32_t> random_prompt(const LoadedModel& model, int64_t length, uint64_t seed) {
  at::manual_seed(seed);
  const at::Tensor ids = at::randint(model.tokenizer.ranks(), {length}, at::kInt);
  return {ids.data_ptr<int32_t>(), ids.data_ptr<int32_t>() + length};
}

// Answers that are said beforehand, in rounds of seven tokens with a slip now and then: most drafts are met,
// some are not.
Request forced_request(const LoadedModel& model, int64_t i) {
  const std::vector<int32_t> part = random_prompt(model, 7, static_cast<uint64_t>(100 + i));
  Request r{.prompt = random_prompt(model, 20 + 50 * i, static_cast<uint64_t>(i)), .max_tokens = 60};
  r.prompt.insert(r.prompt.end(), part.begin(), part.end());
  r.forced = [part](int64_t, int64_t n) { return n % 13 == 12 ? 9 : part[n % 7]; };
  return r;
}

// The log-probabilities of an answer by one forward call, without a state.
std::vector<double> forward_logprobs(const LoadedModel& model, const Request& request, const Answer& answer) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> ids(request.prompt.begin(), request.prompt.end());
  ids.insert(ids.end(), answer.ids.begin(), answer.ids.end());
  const at::Tensor logits = forward_logits(
      model.config, model.weights,
      {at::tensor(ids, at::kLong).to(model.device), make_cu_seqlens({static_cast<int64_t>(ids.size())})});
  const at::Tensor logprobs = logits.log_softmax(1).to(at::kCPU);
  std::vector<double> out;
  for (size_t t = 0; t < answer.ids.size(); ++t)
    out.push_back(
        logprobs[static_cast<int64_t>(request.prompt.size() + t) - 1][answer.ids[t]].item<double>());
  return out;
}

class EngineCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no GPU";
  }
};
class EngineCudaFormats : public EngineCuda, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Formats, EngineCudaFormats, ::testing::Values("", "int8", "mxfp4+int8"));

// Steps of one token and steps that verify drafts, prompts in pieces, packed weights: all say what one
// forward call says, up to roundings to 8 bits of some twenty products in a row.
TEST_P(EngineCudaFormats, LogprobsAreTheModels) {
  const LoadedModel model = cuda_model(GetParam(), /*experts=*/false);
  ASSERT_TRUE(DecodeGraphs::supports(model.config, model.device, at::kBFloat16));
  for (const int64_t drafts : {0, 4}) {
    Engine engine(model, {.max_sequences = 3, .prefill_tokens = 64, .draft_tokens = drafts});
    std::vector<Request> requests;
    for (int64_t i = 0; i < 5; ++i) requests.push_back(forced_request(model, i));
    std::vector<Answer> answers(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) submit(engine, requests[i], answers[i]);
    engine.run_until_idle();
    double sum = 0;
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(answers[i].ids.size(), 60u) << answers[i].finish.error;
      const std::vector<double> want = forward_logprobs(model, requests[i], answers[i]);
      for (size_t t = 0; t < want.size(); ++t) {
        EXPECT_NEAR(answers[i].logprobs[t], want[t], 0.15) << "drafts " << drafts << ", token " << t;
        sum += std::abs(answers[i].logprobs[t] - want[t]);
      }
    }
    EXPECT_LT(sum / 300, 0.02) << "drafts " << drafts;
    if (drafts == 0) continue;
    EXPECT_GT(engine.stats().accepted_tokens, 100);
    EXPECT_GT(engine.stats().drafted_tokens, engine.stats().accepted_tokens);
  }
}

// Bit for bit: beside others, preempted, with and without drafts in a step, after a prefix from the cache.
TEST_P(EngineCudaFormats, DeterministicAnswersDoNotDependOnTheBatch) {
  const LoadedModel model = cuda_model(GetParam(), /*experts=*/true);
  for (const int64_t drafts : {0, 4}) {
    const EngineOptions options{
        .max_sequences = 4, .cache_tokens = 8 * kLatentPage, .draft_tokens = drafts, .deterministic = true};
    std::vector<Request> requests;
    for (int64_t i = 0; i < 7; ++i) {
      if (i % 2 == 0)
        requests.push_back(forced_request(model, i));
      else
        requests.push_back({.prompt = random_prompt(model, 1 + 40 * i, static_cast<uint64_t>(i)),
                            .sampling = {.temperature = 0.8, .seed = static_cast<uint64_t>(i)},
                            .max_tokens = 40});
    }
    Engine engine(model, options);
    std::vector<Answer> answers(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) submit(engine, requests[i], answers[i]);
    engine.run_until_idle();
    EXPECT_GT(engine.stats().preempted, 0);
    if (drafts > 0) {
      EXPECT_GT(engine.stats().accepted_tokens, 30);
    }
    for (size_t i = 0; i < requests.size(); ++i)
      EXPECT_EQ(answers[i], alone(model, requests[i], options)) << "drafts " << drafts << ", request " << i;
  }
}

TEST_F(EngineCuda, PrefixHitEqualsMiss) {
  const LoadedModel model = cuda_model("", /*experts=*/true);
  const EngineOptions options{.max_sequences = 2, .deterministic = true};
  for (const int64_t length : {1024, 1025, 2048, 2100}) {
    const Request request{
        .prompt = random_prompt(model, length, 3), .sampling = {.seed = 4}, .max_tokens = 9};
    Engine engine(model, options);
    Answer first, second;
    submit(engine, request, first);
    engine.run_until_idle();
    submit(engine, request, second);
    engine.run_until_idle();
    EXPECT_GT(length <= 1024 ? 1 : engine.stats().cached_tokens, 0) << length;
    EXPECT_EQ(first, second) << length;
  }
}

TEST_F(EngineCuda, NanEndsOneRequestAndAbortFreesEverything) {
  LoadedModel model = cuda_model("", /*experts=*/true);
  model.weights.embed[77].fill_(std::numeric_limits<float>::quiet_NaN());
  for (const bool deterministic : {false, true}) {  // drawn on the device, on the host
    const EngineOptions options{
        .max_sequences = 3, .draft_tokens = 3, .prefix = {.max_bytes = 0}, .deterministic = deterministic};
    Engine engine(model, options);
    const int64_t free = engine.stats().free_pages;
    Answer sick, well, aborted;
    submit(engine, {.prompt = {1, 77, 3}, .max_tokens = 5}, sick);
    submit(engine, {.prompt = {1, 2, 3}, .sampling = {.temperature = 0}, .max_tokens = 20}, well);
    const int64_t id = submit(engine, {.prompt = {4, 5}, .max_tokens = 1000}, aborted);
    for (int i = 0; i < 5; ++i) engine.step();
    engine.abort(id);
    engine.run_until_idle();
    EXPECT_EQ(sick.finish.reason, FinishReason::kError);
    EXPECT_NE(sick.finish.error.find("NaN"), std::string::npos) << sick.finish.error;
    EXPECT_EQ(well.ids.size(), 20u) << well.finish.error;
    EXPECT_EQ(aborted.finish.reason, FinishReason::kCancelled);
    EXPECT_EQ(engine.stats().running, 0);
    EXPECT_EQ(engine.stats().free_pages, free);
  }
}

// More than the device has: refused from the formulas, before anything is allocated.
TEST_F(EngineCuda, MemoryIsRefusedUpFront) {
  const LoadedModel model = cuda_model("", /*experts=*/false);
  testing::expect_error(
      [&] {
        Engine(model,
               {.max_sequences = 4, .cache_tokens = int64_t{1} << 50, .memory_bytes = int64_t{1} << 33});
      },
      {"MiB needed", "tokens would fit"});
}

}  // namespace
}  // namespace godwit
