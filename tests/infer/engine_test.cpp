#include "godwit/infer/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <map>
#include <numeric>

#include "godwit/infer/generate.h"
#include "godwit/infer/memory.h"
#include "godwit/model/forward.h"
#include "tests/infer/bigram.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

LoadedModel random_model(const char* weights = "") {
  LoadedModel model = test::bigram_model({});
  if (*weights) model.config.moe.inner = model.config.moe.latent = 32;  // groups of MXFP4
  model.weights = init_weights(model.config, 5, at::kCPU, at::kFloat);
  pack_weights(model.config, model.weights, weight_format_of(weights));
  return model;
}

// What holds with weights in fp32 holds with packed ones, whose products have the bits of the same weights in
// fp32.
constexpr const char* kFormats[] = {"", "int8", "mxfp4+int8"};

std::vector<int32_t> random_prompt(const LoadedModel& model, int64_t length, uint64_t seed) {
  at::manual_seed(seed);
  const at::Tensor ids = at::randint(model.tokenizer.ranks(), {length}, at::kInt);
  return {ids.data_ptr<int32_t>(), ids.data_ptr<int32_t>() + length};
}

struct Answer {
  std::vector<int32_t> ids;
  std::vector<double> logprobs;
  Finish finish;
  bool operator==(const Answer& other) const { return ids == other.ids && logprobs == other.logprobs; }
  friend std::ostream& operator<<(std::ostream& out, const Answer& a) {
    out.precision(17);
    for (size_t i = 0; i < a.ids.size(); ++i) out << a.ids[i] << " (" << a.logprobs[i] << ") ";
    return out << a.finish.error;
  }
};

// Submits with callbacks that fill `answers`, one a choice.
int64_t submit(Engine& engine, Request request, std::map<int64_t, Answer>& answers) {
  request.on_token = [&answers](int64_t choice, const DrawnToken& token) {
    answers[choice].ids.push_back(token.id);
    answers[choice].logprobs.push_back(token.logprob);
    return true;
  };
  request.on_finish = [&answers](int64_t choice, const Finish& finish) { answers[choice].finish = finish; };
  return engine.submit(std::move(request));
}

Answer alone(const LoadedModel& model, const Request& request, EngineOptions options = {.max_sequences = 1}) {
  Engine engine(model, options);
  std::map<int64_t, Answer> answers;
  submit(engine, request, answers);
  engine.run_until_idle();
  return answers.at(0);
}

std::vector<Request> mixed_requests(const LoadedModel& model, int64_t count) {
  std::vector<Request> out;
  for (int64_t i = 0; i < count; ++i) {
    Request r{.prompt = random_prompt(model, 1 + 37 * i % 300, static_cast<uint64_t>(i)),
              .sampling = {.temperature = i % 3 == 0 ? 0.0 : 1.0, .seed = static_cast<uint64_t>(i)},
              .max_tokens = 3 + i % 11};
    if (i % 4 == 1) r.sampling.presence_penalty = 0.5;
    out.push_back(std::move(r));
  }
  return out;
}

void expect_all_free(const EngineStats& stats) {
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
}

TEST(Engine, FollowsTheModelGreedily) {
  const LoadedModel model = test::bigram_model({{10, 20}, {20, 30}, {30, 10}});
  Engine engine(model, {});
  const Generation out =
      generate(engine, {.prompt = {5, 10}, .sampling = {.temperature = 0}, .max_tokens = 4});
  EXPECT_EQ(out.ids, (std::vector<int32_t>{20, 30, 10, 20}));
  EXPECT_EQ(out.logprobs.size(), 4u);
  EXPECT_EQ(out.finish.reason, FinishReason::kLength);
  EXPECT_EQ(out.finish.prompt_tokens, 2);
}

TEST(Engine, StopIdEndsTheTextAndIsNotPartOfIt) {
  const int32_t eos = Tokenizer::load(GODWIT_FIXTURES "/tokenizer").special_id(kEos);
  const LoadedModel model = test::bigram_model({{10, 20}, {20, eos}, {eos, 40}});
  Engine engine(model, {});
  const Generation out =
      generate(engine, {.prompt = {10}, .sampling = {.temperature = 0}, .stop_ids = text_stop_ids(model)});
  EXPECT_EQ(out.ids, (std::vector<int32_t>{20}));
  EXPECT_EQ(out.finish.reason, FinishReason::kStop);
  EXPECT_EQ(out.finish.stop_id, eos);
}

TEST(Engine, SpecialsAreDrawnOnlyWhereAllowed) {
  const int32_t open = Tokenizer::load(GODWIT_FIXTURES "/tokenizer").special_id(kOpen);
  const LoadedModel model = test::bigram_model({{10, open}});
  Engine engine(model, {});
  Request request{.prompt = {10}, .sampling = {.temperature = 0}, .max_tokens = 1};
  EXPECT_FALSE(model.tokenizer.is_special(generate(engine, request).ids.at(0)));
  request.allowed_specials = {open};
  EXPECT_EQ(generate(engine, request).ids.at(0), open);
}

TEST(Engine, CallerStops) {
  const LoadedModel model = random_model();
  Engine engine(model, {});
  int seen = 0;
  const Generation out = generate(
      engine, {.prompt = {1, 2, 3}, .max_tokens = 9, .on_token = [&](auto...) { return ++seen < 3; }});
  EXPECT_EQ(out.ids.size(), 3u);
  EXPECT_EQ(out.finish.reason, FinishReason::kCancelled);
}

// The plain forward over everything that was fed and drawn gives the same log-probabilities.
TEST(Engine, LogprobsAreTheModels) {
  const LoadedModel model = random_model();
  const std::vector<int32_t> prompt = random_prompt(model, 150, 3);
  const Answer out = alone(model, {.prompt = prompt, .sampling = {.seed = 4}, .max_tokens = 20});
  std::vector<int64_t> all(prompt.begin(), prompt.end());
  all.insert(all.end(), out.ids.begin(), out.ids.end());
  const at::NoGradGuard no_grad;
  const at::Tensor logits =
      forward_logits(model.config, model.weights,
                     {at::tensor(all, at::kLong), make_cu_seqlens({static_cast<int64_t>(all.size())})});
  const at::Tensor logprobs = logits.to(at::kDouble).log_softmax(1);
  for (size_t i = 0; i < out.ids.size(); ++i) {
    const auto row = static_cast<int64_t>(prompt.size() + i) - 1;
    EXPECT_NEAR(out.logprobs[i], logprobs[row][out.ids[i]].item<double>(), 1e-4) << i;
  }
}

class EngineFormats : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Weights, EngineFormats, ::testing::ValuesIn(kFormats));

TEST_P(EngineFormats, AnswersDoNotDependOnTheBatch) {
  const LoadedModel model = random_model(GetParam());
  const std::vector<Request> requests = mixed_requests(model, 24);
  Engine engine(model, {.max_sequences = 7, .prefill_tokens = 128});
  std::vector<std::map<int64_t, Answer>> answers(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    submit(engine, requests[i], answers[i]);
    if (i % 5 == 0) engine.step();
  }
  engine.run_until_idle();
  expect_all_free(engine.stats());
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(answers[i].at(0), alone(model, requests[i])) << i;
}

// Prefixes at every distance from a page's end; the second time from the cache.
TEST_P(EngineFormats, PrefixHitEqualsMissBitForBit) {
  const LoadedModel model = random_model(GetParam());
  const std::vector<int32_t> text = random_prompt(model, 400, 8);
  Engine engine(model, {.prefill_tokens = 192});
  for (const int64_t length : {63, 64, 65, 127, 128, 129, 200, 256, 320, 400}) {
    const Request request{
        .prompt = {text.begin(), text.begin() + length}, .sampling = {.seed = 3}, .max_tokens = 6};
    const Answer expected = alone(model, request);
    for (const bool again : {false, true}) {
      std::map<int64_t, Answer> answers;
      submit(engine, request, answers);
      engine.run_until_idle();
      EXPECT_EQ(answers.at(0), expected) << length << " " << again;
      if (again) {
        EXPECT_EQ(answers.at(0).finish.cached_tokens, (length - 1) / kLatentPage * kLatentPage);
      }
    }
  }
  EXPECT_GT(engine.stats().cached_tokens, 0);
}

// A third prompt that parts from the first where the second did finds a state there.
TEST(Engine, BranchPointsAreStored) {
  const LoadedModel model = random_model();
  const std::vector<int32_t> common = random_prompt(model, 200, 1);
  Engine engine(model, {});
  int64_t cached = 0;
  for (const uint64_t branch : {10, 11, 12}) {
    std::vector<int32_t> prompt = common;
    const std::vector<int32_t> own = random_prompt(model, 90, branch);
    prompt.insert(prompt.end(), own.begin(), own.end());
    cached = generate(engine, {.prompt = prompt, .max_tokens = 1}).finish.cached_tokens;
  }
  EXPECT_EQ(cached, 192);
}

TEST(Engine, ChoicesEqualRequestsWithTheirSeeds) {
  const LoadedModel model = random_model();
  const Request request{.prompt = random_prompt(model, 100, 2), .sampling = {.seed = 9}, .max_tokens = 8};
  Request three = request;
  three.choices = 3;
  Engine engine(model, {});
  std::map<int64_t, Answer> answers;
  submit(engine, three, answers);
  engine.run_until_idle();
  for (int64_t c = 0; c < 3; ++c) {
    Request one = request;
    one.sampling.seed = choice_seed(9, c);
    EXPECT_EQ(answers.at(c), alone(model, one)) << c;
  }
  EXPECT_NE(answers.at(0).ids, answers.at(1).ids);
  EXPECT_EQ(answers.at(2).finish.cached_tokens, 64);
}

// Too few pages for all of them: the youngest leave and come back, and nobody's answer changes.
TEST_P(EngineFormats, PreemptionChangesNothing) {
  const LoadedModel model = random_model(GetParam());
  std::vector<Request> requests;
  for (int64_t i = 0; i < 4; ++i)
    requests.push_back({.prompt = random_prompt(model, 60, static_cast<uint64_t>(i)),
                        .sampling = {.seed = static_cast<uint64_t>(i)},
                        .max_tokens = 100});
  const EngineOptions options{.max_sequences = 4, .cache_tokens = 6 * kLatentPage};
  Engine engine(model, options);
  std::vector<std::map<int64_t, Answer>> answers(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) submit(engine, requests[i], answers[i]);
  engine.run_until_idle();
  EXPECT_GT(engine.stats().preempted, 0);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(answers[i].at(0), alone(model, requests[i])) << i;
}

TEST(Engine, AbortFreesEverything) {
  const LoadedModel model = random_model();
  Engine engine(model, {.max_sequences = 3, .prefix = {.max_bytes = 0}});
  const int64_t free = engine.stats().free_pages;
  std::vector<std::map<int64_t, Answer>> answers(5);
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 5; ++i)
    ids.push_back(submit(engine, {.prompt = random_prompt(model, 70, 1), .max_tokens = 1000}, answers[i]));
  for (int i = 0; i < 4; ++i) engine.step();
  for (const int64_t id : ids) engine.abort(id);
  EXPECT_FALSE(engine.step());
  expect_all_free(engine.stats());
  EXPECT_EQ(engine.stats().free_pages, free);
  for (auto& a : answers) EXPECT_EQ(a.at(0).finish.reason, FinishReason::kCancelled);
}

// NaN in one sequence's logits ends that request with an error; the slot is clean for the next.
TEST(Engine, NanEndsOneRequest) {
  LoadedModel model = random_model();
  model.weights.embed[77].fill_(std::numeric_limits<float>::quiet_NaN());
  const Request healthy{.prompt = {1, 2, 3}, .sampling = {.temperature = 0}, .max_tokens = 5};
  const Answer expected = alone(model, healthy);
  Engine engine(model, {.max_sequences = 2});
  std::map<int64_t, Answer> sick, well, after;
  submit(engine, {.prompt = {1, 77, 3}, .max_tokens = 5}, sick);
  submit(engine, healthy, well);
  engine.run_until_idle();
  EXPECT_EQ(sick.at(0).finish.reason, FinishReason::kError);
  EXPECT_NE(sick.at(0).finish.error.find("NaN"), std::string::npos) << sick.at(0).finish.error;
  EXPECT_EQ(well.at(0), expected);
  submit(engine, healthy, after);
  engine.run_until_idle();
  EXPECT_EQ(after.at(0), expected);
}

// Prompts that repeat themselves, so that there is something to draft; the bigram model repeats itself for
// sure.
TEST_P(EngineFormats, SpeculationChangesNothing) {
  const LoadedModel model = random_model(GetParam());
  struct OnlySome : TokenConstraint {  // eleven tokens, so that drafts are met
    void forbid(at::Tensor& forbidden) override {
      for (int64_t i = 0; i < forbidden.numel(); ++i) forbidden[i] = i < 40 || i > 50;
    }
    void accept(int32_t id) override { last = id; }
    int32_t last = 0;
  };
  std::vector<Request> requests;
  for (int64_t i = 0; i < 9; ++i) {
    Request r{
        .prompt = {},
        .sampling = {.temperature = i % 3 == 0 ? 0.0 : 0.7, .top_k = 3, .seed = static_cast<uint64_t>(i)},
        .max_tokens = 40 + 5 * i};
    const std::vector<int32_t> part = random_prompt(model, 9 + i, static_cast<uint64_t>(i));
    for (int64_t n = 0; n < 2 + i; ++n) r.prompt.insert(r.prompt.end(), part.begin(), part.end());
    if (i % 2 == 1) r.constraint = [] { return std::make_unique<OnlySome>(); };
    if (i == 4) r.sampling.presence_penalty = 0.5;
    if (i == 5) r.stop_ids = {45};
    requests.push_back(std::move(r));
  }
  Engine engine(
      model, {.max_sequences = 4, .cache_tokens = 8 * kLatentPage, .prefill_tokens = 64, .draft_tokens = 5});
  std::vector<std::map<int64_t, Answer>> answers(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) submit(engine, requests[i], answers[i]);
  engine.run_until_idle();
  expect_all_free(engine.stats());
  EXPECT_GT(engine.stats().accepted_tokens, 0);
  EXPECT_GT(engine.stats().drafted_tokens, engine.stats().accepted_tokens);
  for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(answers[i].at(0), alone(model, requests[i])) << i;
}

TEST(Engine, SpeculationSavesSteps) {
  const LoadedModel model = test::bigram_model({{10, 20}, {20, 30}, {30, 10}});
  Engine engine(model, {.draft_tokens = 4});
  const Generation out =
      generate(engine, {.prompt = {5, 10}, .sampling = {.temperature = 0}, .max_tokens = 60});
  for (size_t i = 0; i < out.ids.size(); ++i)
    EXPECT_EQ(out.ids[i], static_cast<int32_t>(20 + i % 3 * 10 - i % 3 / 2 * 30));
  EXPECT_EQ(out.ids.size(), 60u);
  EXPECT_LT(engine.stats().steps, 20);
  EXPECT_EQ(engine.stats().drawn_tokens, 60);
}

// A small store: prefixes go to host memory and come back, and answers do not change.
TEST_P(EngineFormats, PrefixFromHostMemoryEqualsMiss) {
  const LoadedModel model = random_model(GetParam());
  Engine engine(model, {.max_sequences = 1, .cache_tokens = 5 * kLatentPage});
  std::vector<std::vector<int32_t>> prompts;
  for (uint64_t i = 0; i < 3; ++i) prompts.push_back(random_prompt(model, 200 + static_cast<int64_t>(i), i));
  for (int round = 0; round < 2; ++round) {
    for (const auto& prompt : prompts) {
      const Request request{.prompt = prompt, .sampling = {.seed = 3}, .max_tokens = 6};
      std::map<int64_t, Answer> answers;
      submit(engine, request, answers);
      engine.run_until_idle();
      EXPECT_EQ(answers.at(0), alone(model, request));
      EXPECT_EQ(answers.at(0).finish.cached_tokens, round == 0 ? 0 : 192);
    }
  }
  EXPECT_GT(engine.stats().host_entries, 0);
}

// The cache in 8 bits: other numbers than in fp32, near them, and the same promises.
TEST(Engine, Fp8LatentsKeepThePromises) {
  const LoadedModel model = random_model();
  std::vector<Request> requests = mixed_requests(model, 12);
  for (Request& r : requests) r.max_tokens += 60;
  const EngineOptions few{.max_sequences = 4,
                          .cache_tokens = 8 * kLatentPage,
                          .prefill_tokens = 64,
                          .draft_tokens = 3,
                          .fp8_latents = true};
  Engine engine(model, few), wide(model, {.max_sequences = 4, .cache_tokens = 8 * kLatentPage});
  EXPECT_LT(engine.stats().state_bytes, wide.stats().state_bytes);
  for (int round = 0; round < 2; ++round) {  // the second time from the prefix cache
    std::vector<std::map<int64_t, Answer>> answers(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) submit(engine, requests[i], answers[i]);
    engine.run_until_idle();
    for (size_t i = 0; i < requests.size(); ++i)
      EXPECT_EQ(answers[i].at(0), alone(model, requests[i], {.max_sequences = 1, .fp8_latents = true})) << i;
  }
  EXPECT_GT(engine.stats().preempted, 0);
  EXPECT_GT(engine.stats().cached_tokens, 0);
  double off = 0;
  for (const Request& request : requests) {
    const Answer exact = alone(model, request), coarse = alone(model, request, {.fp8_latents = true});
    off = std::max(off, std::abs(exact.logprobs[0] - coarse.logprobs[0]));
  }
  EXPECT_GT(off, 0);
  EXPECT_LT(off, 0.1);  // three bits of mantissa, in two layers of attention
}

// On the CPU fp32 keeps the promise as it is; nothing else can.
TEST(Engine, DeterministicIsRefusedWhereItCannotBeKept) {
  LoadedModel model = random_model();
  const Request request{.prompt = random_prompt(model, 70, 1), .sampling = {.seed = 2}, .max_tokens = 5};
  EXPECT_EQ(alone(model, request, {.deterministic = true}), alone(model, request));
  model.weights = init_weights(model.config, 5, at::kCPU, at::kBFloat16);
  testing::expect_error([&] { Engine(model, {.deterministic = true}); }, {"deterministic", "fp32"});
}

TEST(Engine, ConstraintNarrowsTheDraw) {
  struct OnlyEven : TokenConstraint {
    void forbid(at::Tensor& forbidden) override { forbidden.slice(0, 1, std::nullopt, 2).fill_(true); }
    void accept(int32_t id) override { EXPECT_EQ(id % 2, 0); }
  };
  const LoadedModel model = random_model();
  Engine engine(model, {});
  const Generation out = generate(
      engine, {.prompt = {1}, .max_tokens = 20, .constraint = [] { return std::make_unique<OnlyEven>(); }});
  for (const int32_t id : out.ids) EXPECT_EQ(id % 2, 0);
}

TEST(Engine, RefusesWhatCannotRun) {
  const LoadedModel model = random_model();
  Engine engine(model, {.max_context = 128});
  testing::expect_error([&] { engine.submit({.prompt = {}}); }, {"prompt"});
  testing::expect_error([&] { engine.submit({.prompt = std::vector<int32_t>(128, 1)}); }, {"128"});
  testing::expect_error([&] { engine.submit({.prompt = {1 << 30}}); }, {"vocabulary"});
  testing::expect_error([&] { engine.submit({.prompt = {1}, .max_tokens = 0}); }, {"max_tokens"});
  const Generation out = generate(engine, {.prompt = std::vector<int32_t>(127, 1), .max_tokens = 50});
  EXPECT_EQ(out.ids.size(), 1u);  // the context is full
  EXPECT_EQ(out.finish.reason, FinishReason::kLength);
}

TEST(EngineMemory, RefusedBeforeAnythingIsAllocatedOrMadeToFit) {
  const LoadedModel model = random_model();
  // A store that no machine has: were it allocated first, the message would be the allocator's.
  const EngineOptions huge{
      .max_sequences = 4, .cache_tokens = int64_t{1} << 50, .memory_bytes = int64_t{1} << 30};
  testing::expect_error([&] { Engine(model, huge); }, {"MiB needed", "tokens would fit", "1024.0 MiB free"});
  testing::expect_error([&] { Engine(model, {.memory_bytes = 1000}); }, {"not even one page"});
  // Of a size that was not asked for, as much as there is room for.
  EngineOptions free = fit_options(model.config, {.max_sequences = 64}, at::kFloat);
  const int64_t most = engine_memory(model.config, free, at::kFloat).total();
  free.cache_tokens = 0;
  free.memory_bytes = most * 3 / 4;
  const EngineOptions fitted = fit_options(model.config, free, at::kFloat);
  EXPECT_LE(engine_memory(model.config, fitted, at::kFloat).total(), free.memory_bytes);
  EXPECT_GT(engine_memory(model.config, fitted, at::kFloat).total(), free.memory_bytes - (1 << 20));
  EXPECT_EQ(fitted.cache_tokens % kLatentPage, 0);
  // The store takes what was said.
  const EngineOptions small{.max_sequences = 3, .cache_tokens = 640};
  Engine engine(model, small);
  const EngineMemory memory =
      engine_memory(model.config, fit_options(model.config, small, at::kFloat), at::kFloat);
  EXPECT_EQ(engine.stats().state_bytes, memory.slots + memory.pages);
}

}  // namespace
}  // namespace godwit
