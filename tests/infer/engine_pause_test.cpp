// A request that is paused, and gone on with from the state of what it had read.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "godwit/infer/engine.h"
#include "tests/infer/bigram.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

constexpr int64_t kDrawn = 9;

struct Answer {
  std::vector<int32_t> ids;
  std::vector<double> logp;
  Finish finish;
};

LoadedModel random_model(const char* weights = "") {
  LoadedModel model = test::bigram_model({});
  if (*weights) model.config.moe.inner = model.config.moe.latent = 32;  // groups of MXFP4
  model.weights = init_weights(model.config, 5, at::kCPU, at::kFloat);
  pack_weights(model.config, model.weights, weight_format_of(weights));
  return model;
}

void change(LoadedModel& model) {
  for_each_param(model.config, model.weights, [](const ParamInfo&, at::Tensor& value) { value.mul_(1.02); });
}

Request request_of(const LoadedModel& model, int64_t length) {
  at::manual_seed(static_cast<uint64_t>(length));
  const at::Tensor ids = at::randint(model.tokenizer.ranks(), {length}, at::kInt);
  Request request;
  request.prompt = {ids.data_ptr<int32_t>(), ids.data_ptr<int32_t>() + length};
  request.sampling.temperature = 1;
  request.sampling.seed = 7;
  request.sampling.policy_logprob = true;
  request.max_tokens = kDrawn;
  return request;
}

// Up to `steps` steps of the engine; then the request is taken out, with its state.
Answer part(Engine& engine, Request request, int64_t steps) {
  Answer out;
  request.keep_state = [](int64_t) { return true; };
  request.on_token = [&out](int64_t, const DrawnToken& token) {
    out.ids.push_back(token.id);
    out.logp.push_back(token.policy_logprob);
    return true;
  };
  request.on_finish = [&out](int64_t, const Finish& finish) { out.finish = finish; };
  const int64_t id = engine.submit(std::move(request));
  for (int64_t i = 0; i < steps && engine.step(); ++i) {
  }
  engine.abort(id);
  engine.step();
  return out;
}

// The request's rest, from where `first` has come.
Request rest_of(Request request, const Answer& first) {
  request.prompt.insert(request.prompt.end(), first.ids.begin(), first.ids.end());
  request.max_tokens -= static_cast<int64_t>(first.ids.size());
  request.state = first.finish.state;
  return request;
}

constexpr EngineOptions kOptions = {.max_sequences = 2, .max_context = 512, .prefill_tokens = kLatentPage};

TEST(EnginePause, GoesOnBitForBitInAnotherEngine) {
  for (const char* weights : {"", "int8"}) {
    const LoadedModel model = random_model(weights);
    for (const int64_t length : {1, 15, 63, 64, 65, 257}) {
      const Request request = request_of(model, length);
      Engine straight(model, kOptions);
      const Answer whole = part(straight, request, 1000);
      ASSERT_EQ(whole.ids.size(), static_cast<size_t>(kDrawn));
      for (int64_t steps = 1;; ++steps) {
        Engine engine(model, kOptions), other(model, kOptions);
        const Answer first = part(engine, request, steps);
        if (static_cast<int64_t>(first.ids.size()) == kDrawn) break;
        ASSERT_TRUE(first.finish.state) << length << ", " << steps;
        EXPECT_EQ(first.finish.state->length, first.ids.empty()
                                                  ? steps * kLatentPage
                                                  : length + static_cast<int64_t>(first.ids.size()) - 1);
        EXPECT_EQ(engine.stats().running, 0);
        const Answer second = part(other, rest_of(request, first), 1000);
        std::vector<int32_t> ids = first.ids;
        std::vector<double> logp = first.logp;
        ids.insert(ids.end(), second.ids.begin(), second.ids.end());
        logp.insert(logp.end(), second.logp.begin(), second.logp.end());
        EXPECT_EQ(ids, whole.ids) << length << ", " << steps;
        EXPECT_EQ(logp, whole.logp) << length << ", " << steps;
      }
    }
  }
}

// The weights change in place: under a running sequence, and between a pause and what follows it.
TEST(EnginePause, OverAnUpdateItIsWhatANeverPausedEngineDraws) {
  for (const int64_t steps : {2, 3, 7, 11}) {
    LoadedModel a = random_model(), b = random_model();
    const Request request = request_of(a, 200);
    Answer straight;
    {
      Engine engine(a, kOptions);
      Request running = request;
      running.on_token = [&](int64_t, const DrawnToken& token) {
        straight.ids.push_back(token.id);
        straight.logp.push_back(token.policy_logprob);
        return true;
      };
      engine.submit(std::move(running));
      for (int64_t i = 0; i < steps; ++i) engine.step();
      change(a);
      engine.run_until_idle();
    }
    Engine engine(b, kOptions);
    const Answer first = part(engine, request, steps);
    change(b);
    Engine other(b, kOptions);
    const Answer second = part(other, rest_of(request, first), 1000);
    std::vector<double> logp = first.logp;
    logp.insert(logp.end(), second.logp.begin(), second.logp.end());
    EXPECT_EQ(logp, straight.logp) << steps;
    // What the new weights alone would say is something else.
    Request anew = rest_of(request, first);
    anew.state = nullptr;
    EXPECT_NE(part(other, anew, 1000).logp, second.logp) << steps;
  }
}

TEST(EnginePause, AStateMustBeOfTheRequest) {
  const LoadedModel model = random_model();
  Engine engine(model, kOptions);
  const Request request = request_of(model, 70);
  const Answer first = part(engine, request, 4);
  Request rest = rest_of(request, first);
  rest.prompt.resize(static_cast<size_t>(first.finish.state->length));
  testing::expect_error([&] { engine.submit(rest); }, {"a state after", "cannot be gone on from"});
  rest = rest_of(request, first);
  rest.choices = 2;
  testing::expect_error([&] { engine.submit(rest); }, {"2 choices"});
}

}  // namespace
}  // namespace godwit
