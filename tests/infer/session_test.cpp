#include "godwit/infer/session.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "tests/infer/bigram.h"
#include "tests/support/compare.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

LoadedModel random_model() {
  LoadedModel model = test::bigram_model({});
  model.weights = init_weights(model.config, 5, at::kCPU, at::kFloat);
  return model;
}

TEST(Session, FollowsTheModelGreedily) {
  const LoadedModel model = test::bigram_model({{10, 20}, {20, 30}, {30, 10}});
  Session session(model);
  const std::vector<int32_t> prompt = {5, 10};
  std::vector<int32_t> streamed;
  const Generation out =
      session.generate(prompt, {.sampling = {.temperature = 0}, .max_tokens = 4}, [&](int32_t id) {
        streamed.push_back(id);
        return true;
      });
  EXPECT_EQ(out.ids, (std::vector<int32_t>{20, 30, 10, 20}));
  EXPECT_EQ(streamed, out.ids);
  EXPECT_EQ(out.logprobs.size(), 4u);
  EXPECT_EQ(out.finish_reason, "length");
  EXPECT_EQ(out.prompt_tokens, 2);
  EXPECT_EQ(session.tokens(), 6);
}

TEST(Session, StopIdEndsTheTextAndIsSeen) {
  const int32_t eos = Tokenizer::load(GODWIT_FIXTURES "/tokenizer").special_id(kEos);
  const LoadedModel model = test::bigram_model({{10, 20}, {20, eos}, {eos, 40}});
  Session session(model);
  const std::vector<int32_t> prompt = {10};
  const GenerateOptions options{.sampling = {.temperature = 0}, .stop_ids = text_stop_ids(model)};
  const Generation out = session.generate(prompt, options);
  EXPECT_EQ(out.ids, (std::vector<int32_t>{20}));
  EXPECT_EQ(out.finish_reason, "stop");
  EXPECT_EQ(session.tokens(), 3);  // prompt, 20 and the stop id
}

TEST(Session, SpecialsAreDrawnOnlyWhereAllowed) {
  const int32_t open = Tokenizer::load(GODWIT_FIXTURES "/tokenizer").special_id(kOpen);
  const LoadedModel model = test::bigram_model({{10, open}});
  const std::vector<int32_t> prompt = {10};
  GenerateOptions options{.sampling = {.temperature = 0}, .max_tokens = 1};
  EXPECT_FALSE(model.tokenizer.is_special(Session(model).generate(prompt, options).ids.at(0)));
  options.allowed_specials = {open};
  EXPECT_EQ(Session(model).generate(prompt, options).ids.at(0), open);
}

TEST(Session, CallerStops) {
  const LoadedModel model = random_model();
  Session session(model);
  const std::vector<int32_t> prompt = {1, 2, 3};
  int seen = 0;
  const Generation out = session.generate(prompt, {.max_tokens = 9}, [&](int32_t) { return ++seen < 3; });
  EXPECT_EQ(out.ids.size(), 3u);
  EXPECT_EQ(out.finish_reason, "cancelled");
  EXPECT_EQ(session.tokens(), 6);
}

// A turn after a turn: the state goes on, nothing is fed twice.
TEST(Session, SecondPromptGoesOnFromTheFirst) {
  const LoadedModel model = random_model();
  const GenerateOptions options{.sampling = {.temperature = 0}, .max_tokens = 5};
  Session session(model);
  const std::vector<int32_t> first = {1, 2, 3}, second = {7, 8};
  const Generation a = session.generate(first, options);
  std::vector<int32_t> all = first;
  all.insert(all.end(), a.ids.begin(), a.ids.end());
  all.insert(all.end(), second.begin(), second.end());
  const at::Tensor carried = session.feed(second);
  EXPECT_EQ(session.tokens(), static_cast<int64_t>(all.size()));
  EXPECT_TRUE(test::close(carried, Session(model).feed(all), test::kFp32Model));
}

TEST(Session, LongPromptsGoInPieces) {
  const LoadedModel model = random_model();
  at::manual_seed(4);
  const at::Tensor ids = at::randint(model.tokenizer.ranks(), {kPrefillPiece + 17}, at::kLong);
  const auto* p = ids.data_ptr<int64_t>();
  const std::vector<int32_t> prompt(p, p + ids.numel());
  const at::NoGradGuard no_grad;
  const at::Tensor hidden =
      forward_hidden(model.config, model.weights, {.ids = ids, .cu_seqlens = make_cu_seqlens({ids.numel()})});
  const at::Tensor expected = at::linear(hidden.slice(0, -1), model.weights.lm_head)[0];
  EXPECT_TRUE(test::close(Session(model).feed(prompt), expected, test::kFp32Model));
}

TEST(Session, NoPromptIsAnError) {
  const LoadedModel model = random_model();
  testing::expect_error([&] { Session(model).generate({}, {}); }, {"prompt"});
}

}  // namespace
}  // namespace godwit
