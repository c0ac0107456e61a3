// The tasks are what they say, and scores are right on a model whose answers are known.
#include "godwit/infer/recall.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "godwit/infer/evaluate.h"
#include "tests/infer/bigram.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

TEST(Mqar, EveryKeyComesAgainWithItsValue) {
  const MqarTask task{.pairs = 50, .seed = 3};
  const std::vector<int32_t> ids = mqar_sequence(task, 1, 200);
  ASSERT_EQ(ids.size(), 200u);
  EXPECT_EQ(std::set<int32_t>(ids.begin(), ids.begin() + 100).size(), 100u);
  EXPECT_LT(*std::max_element(ids.begin(), ids.end()), 200);
  std::map<int32_t, int32_t> pairs;
  for (size_t i = 0; i < 100; i += 2) pairs[ids[i]] = ids[i + 1];
  for (size_t i = 100; i < 200; i += 2) {
    ASSERT_TRUE(pairs.contains(ids[i]));
    EXPECT_EQ(pairs[ids[i]], ids[i + 1]);
    pairs.erase(ids[i]);
  }
  EXPECT_TRUE(pairs.empty());
  EXPECT_EQ(mqar_sequence(task, 1, 200), ids);
  EXPECT_NE(mqar_sequence(task, 2, 200), ids);
  testing::expect_error([&] { mqar_sequence(task, 1, 99); }, {"50 pairs", "99"});
}

TEST(Mqar, CountsWhatTheModelKnows) {
  const MqarTask task{.pairs = 16, .samples = 3};
  std::map<int32_t, int32_t> next;
  const int32_t ranks = test::bigram_model({}).tokenizer.ranks();
  for (int64_t sample = 0; sample < 3; ++sample) {
    const std::vector<int32_t> ids = mqar_sequence(task, sample, ranks);
    const int64_t known = sample == 0 ? 16 : sample == 1 ? 4 : 0;
    for (int64_t i = 0; i < known; ++i) next[ids[2 * i]] = ids[2 * i + 1];
  }
  const Score score = mqar(test::bigram_model(next), task);
  EXPECT_EQ(score.total, 48);
  EXPECT_EQ(score.right, 20);
}

TEST(Needle, StandsWhereItShould) {
  const Tokenizer tokenizer = Tokenizer::load(GODWIT_FIXTURES "/tokenizer");
  std::vector<int32_t> haystack(500);
  for (size_t i = 0; i < haystack.size(); ++i) haystack[i] = static_cast<int32_t>(i);
  for (const double depth : {0.0, 0.25, 1.0}) {
    for (const int64_t distractors : {0, 3}) {
      const NeedleTask task{.length = 1024, .depth = depth, .distractors = distractors};
      const NeedleSample sample = needle_sample(tokenizer, haystack, task, 2);
      ASSERT_EQ(sample.ids.size(), 1024u);
      const std::string text = tokenizer.decode(sample.ids);
      const std::string answer =
          tokenizer.decode(std::span(sample.ids).subspan(static_cast<size_t>(sample.answer)));
      EXPECT_EQ(answer.size(), 7u) << answer;
      const size_t question = text.rfind("\nThe special number of the ");
      const std::string asked = text.substr(question, text.size() - question);
      EXPECT_NE(text.find(asked), question) << "the needle has the question's words and answer: " << asked;
      if (distractors == 0) {
        const auto last_place = static_cast<double>(sample.answer) - 2.0 * (1024.0 - sample.answer + 12.0);
        EXPECT_NEAR(static_cast<double>(sample.needle), depth * last_place, 40.0);
      }
    }
  }
  testing::expect_error([&] { needle_sample(tokenizer, haystack, {.length = 20}, 0); }, {"20 tokens"});
  testing::expect_error([&] { needle_sample(tokenizer, {}, {}, 0); }, {"haystack"});
}

TEST(Needle, ScoresTokensAndWholeNumbers) {
  const std::vector<int32_t> haystack(100, 3);
  const LoadedModel blank = test::bigram_model({});
  // A number in which no token comes twice, so that bigrams can know it.
  NeedleTask task{.length = 300, .samples = 1};
  NeedleSample sample;
  std::map<int32_t, int32_t> next;
  std::set<int32_t> followers;
  do {
    ++task.seed;
    sample = needle_sample(blank.tokenizer, haystack, task, 0);
    next.clear();
    followers.clear();
    for (size_t t = sample.answer; t < sample.ids.size(); ++t) {
      next[sample.ids[t - 1]] = sample.ids[t];
      followers.insert(sample.ids[t]);
    }
  } while (next.size() + sample.answer < sample.ids.size() || followers.size() < next.size());
  const auto size = static_cast<int64_t>(next.size());
  const NeedleScore all = needle(test::bigram_model(next), haystack, task);
  EXPECT_EQ(all.tokens.total, size);
  EXPECT_EQ(all.tokens.right, size);
  EXPECT_EQ(all.numbers.right, 1);
  next.erase(sample.ids[sample.answer]);
  const NeedleScore part = needle(test::bigram_model(next), haystack, task);
  EXPECT_EQ(part.tokens.right, size - 1);
  EXPECT_EQ(part.numbers.right, 0);
  EXPECT_EQ(part.numbers.total, 1);
}

TEST(TextEvaluation, EveryTokenButTheFirstOnceWhateverTheWindow) {
  const LoadedModel model = test::bigram_model({{10, 20}, {20, 30}});
  const std::vector<int32_t> document = {10, 20, 30, 10, 20, 30, 10};
  std::vector<double> nats;
  for (const int64_t window : {100, 7, 3, 1}) {
    TextEvaluation evaluation(model, window);
    evaluation.add_document(document);
    evaluation.add_document({});
    evaluation.add_document(document);
    const TextLoss loss = evaluation.finish();
    EXPECT_EQ(loss.documents, 2);
    EXPECT_EQ(loss.tokens, 12);
    EXPECT_EQ(loss.by_position.tokens(), 12);
    int64_t bytes = 0;
    for (size_t t = 1; t < document.size(); ++t)
      bytes += 2 * static_cast<int64_t>(model.tokenizer.token_bytes(document[t]).size());
    EXPECT_EQ(loss.bytes, bytes);
    EXPECT_NEAR(loss.bits_per_byte(), loss.nats / std::log(2.0) / static_cast<double>(bytes), 1e-12);
    EXPECT_NEAR(loss.nats_per_token(), loss.nats / 12, 1e-12);
    EXPECT_EQ(loss.by_position.buckets().back().begin, window == 1 ? 1 : window == 3 ? 2 : 4);
    nats.push_back(loss.nats);
  }
  // A model of bigrams does not care where windows are cut.
  for (const double n : nats) EXPECT_NEAR(n, nats[0], 1e-4);
}

}  // namespace
}  // namespace godwit
