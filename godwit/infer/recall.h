// What a model can look up in its context: random key-value pairs, and a needle in a haystack of text. Both
// are scored teacher-forced: the likeliest token, over the whole vocabulary, where the answer stands.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "godwit/infer/model.h"

namespace godwit {

struct Score {
  int64_t right = 0;
  int64_t total = 0;

  double accuracy() const {
    return total > 0 ? static_cast<double>(right) / static_cast<double>(total) : 0.0;
  }
};

// Multi-query associative recall (Arora et al., arXiv:2312.04927) in the context alone: `pairs` keys with
// their values, then every key once more in another order, each followed by its value. All 2 `pairs` tokens
// are distinct and drawn from the vocabulary without the special tokens. A guess among the values seen is
// right once in `pairs`.
struct MqarTask {
  int64_t pairs = 8;
  int64_t samples = 32;
  uint64_t seed = 0;

  int64_t length() const { return 4 * pairs; }
};
// One sequence of the task, [4 pairs] ids.
std::vector<int32_t> mqar_sequence(const MqarTask& task, int64_t sample, int32_t ranks);
// Over all queries of all samples.
Score mqar(const LoadedModel& model, const MqarTask& task);

// A sentence with a seven-digit number for a name, `depth` of the way into `length` tokens of other text; the
// name comes again at the very end, and the number is to follow.
struct NeedleTask {
  int64_t length = 1024;    // of everything: haystack, needles, question, answer
  double depth = 0.5;       // 0: at the beginning, 1: right before the question
  int64_t distractors = 0;  // more needles of other names, at random places
  int64_t samples = 10;
  uint64_t seed = 0;
};
struct NeedleSample {
  std::vector<int32_t> ids;  // [length]
  int64_t answer = 0;        // its first position
  int64_t needle = 0;        // position of the needle's first token
};
// `haystack` is text as ids; a sample begins at a random place of it and runs round. Error when `length` is
// too short for the needles and the question.
NeedleSample needle_sample(const Tokenizer& tokenizer, std::span<const int32_t> haystack,
                           const NeedleTask& task, int64_t sample);

struct NeedleScore {
  Score numbers;  // every token of the number right
  Score tokens;
};
NeedleScore needle(const LoadedModel& model, std::span<const int32_t> haystack, const NeedleTask& task);

}  // namespace godwit
