#include "godwit/infer/recall.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <string_view>
#include <unordered_set>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/model/evaluate.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr uint64_t kMqarStream = 0x6d716172;      // "mqar"
constexpr uint64_t kNeedleStream = 0x6e6565646c;  // "needl"

// Names that no haystack is likely to have.
constexpr std::string_view kNames[] = {"godwit",     "curlew",    "dunlin",       "whimbrel", "avocet",
                                       "phalarope",  "turnstone", "lapwing",      "plover",   "sanderling",
                                       "knot",       "snipe",     "tattler",      "dotterel", "redshank",
                                       "greenshank", "ruff",      "oystercatcher"};

// Draws numbers of one sample, one after another.
class Draw {
 public:
  Draw(uint64_t seed, uint64_t stream, uint64_t sample) : seed_(random_bits(seed, stream, sample)) {}
  int64_t below(int64_t n) {
    return static_cast<int64_t>(random_bits(seed_, 0, next_++) % static_cast<uint64_t>(n));
  }

 private:
  uint64_t seed_, next_ = 0;
};

template <class T>
void shuffle(std::vector<T>& items, Draw& draw) {
  for (size_t i = items.size(); i > 1; --i)
    std::swap(items[i - 1], items[draw.below(static_cast<int64_t>(i))]);
}

Tensor to_ids(const std::vector<int32_t>& ids, at::Device device) {
  return at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong).to(device);
}

void append(std::vector<int32_t>& to, const std::vector<int32_t>& ids) {
  to.insert(to.end(), ids.begin(), ids.end());
}

}  // namespace

std::vector<int32_t> mqar_sequence(const MqarTask& task, int64_t sample, int32_t ranks) {
  check(task.pairs > 0 && 2 * task.pairs <= ranks, "mqar: {} pairs need {} distinct tokens, there are {}",
        task.pairs, 2 * task.pairs, ranks);
  Draw draw(task.seed, kMqarStream, sample);
  std::vector<int32_t> tokens;
  std::unordered_set<int32_t> taken;
  while (static_cast<int64_t>(tokens.size()) < 2 * task.pairs) {
    const auto id = static_cast<int32_t>(draw.below(ranks));
    if (taken.insert(id).second) tokens.push_back(id);
  }
  std::vector<int64_t> order(task.pairs);
  for (int64_t i = 0; i < task.pairs; ++i) order[i] = i;
  shuffle(order, draw);
  std::vector<int32_t> ids = tokens;
  for (const int64_t pair : order) {
    ids.push_back(tokens[2 * pair]);
    ids.push_back(tokens[2 * pair + 1]);
  }
  return ids;
}

Score mqar(const LoadedModel& model, const MqarTask& task) {
  const at::NoGradGuard no_grad;
  const int64_t length = task.length();
  const int64_t at_once = std::max<int64_t>(1, kEvaluationPiece / length);
  // A key stands at every second position of the last half; its value is to follow.
  std::vector<int64_t> keys;
  for (int64_t t = 2 * task.pairs; t < length; t += 2) keys.push_back(t);
  Score score;
  for (int64_t first = 0; first < task.samples; first += at_once) {
    const int64_t count = std::min(at_once, task.samples - first);
    std::vector<int32_t> ids;
    std::vector<int64_t> rows;
    for (int64_t n = 0; n < count; ++n) {
      for (const int64_t key : keys) rows.push_back(n * length + key);
      append(ids, mqar_sequence(task, first + n, model.tokenizer.ranks()));
    }
    const Tensor batch = to_ids(ids, model.device);
    const Tensor hidden =
        forward_hidden(model.config, model.weights,
                       {.ids = batch, .cu_seqlens = make_cu_seqlens(std::vector<int64_t>(count, length))});
    const Tensor at = at::tensor(rows, at::kLong).to(model.device);
    const Tensor guess = likeliest_tokens(model.config, model.weights, hidden.index_select(0, at));
    const Tensor value = batch.index_select(0, at + 1).to(at::kCPU);
    score.right += guess.eq(value).sum().item<int64_t>();
    score.total += value.numel();
  }
  return score;
}

NeedleSample needle_sample(const Tokenizer& tokenizer, std::span<const int32_t> haystack,
                           const NeedleTask& task, int64_t sample) {
  check(!haystack.empty(), "needle: the haystack has no text");
  check(task.distractors >= 0 && task.distractors < static_cast<int64_t>(std::size(kNames)),
        "needle: 0 to {} distractors, got {}", std::size(kNames) - 1, task.distractors);
  Draw draw(task.seed, kNeedleStream, sample);
  std::vector<std::string_view> names(std::begin(kNames), std::end(kNames));
  shuffle(names, draw);
  // Question and needle are the same tokens up to the number, whatever stands around them.
  const auto question = [&](int64_t i) {
    return tokenizer.encode("\nThe special number of the " + std::string(names[i]) + " is: ");
  };
  const auto number = [&] { return tokenizer.encode(std::to_string(1000000 + draw.below(9000000))); };
  const std::vector<int32_t> end = tokenizer.encode(".\n");
  const auto sentence = [&](int64_t i, const std::vector<int32_t>& digits) {
    std::vector<int32_t> ids = question(i);
    append(ids, digits);
    append(ids, end);
    return ids;
  };
  const std::vector<int32_t> answer = number();
  struct Insert {
    double place;
    std::vector<int32_t> ids;
    bool asked;
  };
  std::vector<Insert> inserts = {{task.depth, sentence(0, answer), true}};
  for (int64_t i = 1; i <= task.distractors; ++i) {
    const double place = static_cast<double>(draw.below(1 << 20)) / (1 << 20);
    inserts.push_back({place, sentence(i, number()), false});
  }
  std::stable_sort(inserts.begin(), inserts.end(),
                   [](const Insert& a, const Insert& b) { return a.place < b.place; });
  int64_t text = task.length - static_cast<int64_t>(question(0).size() + answer.size());
  for (const Insert& insert : inserts) text -= static_cast<int64_t>(insert.ids.size());
  check(text > 0, "needle: {} tokens are too few for the needles and the question", task.length);

  NeedleSample out;
  const auto size = static_cast<int64_t>(haystack.size());
  int64_t at = draw.below(size), done = 0;
  const auto fill_to = [&](int64_t n) {
    for (; done < n; ++done) out.ids.push_back(haystack[at++ % size]);
  };
  for (const Insert& insert : inserts) {
    fill_to(std::llround(insert.place * static_cast<double>(text)));
    if (insert.asked) out.needle = static_cast<int64_t>(out.ids.size());
    append(out.ids, insert.ids);
  }
  fill_to(text);
  append(out.ids, question(0));
  out.answer = static_cast<int64_t>(out.ids.size());
  append(out.ids, answer);
  return out;
}

NeedleScore needle(const LoadedModel& model, std::span<const int32_t> haystack, const NeedleTask& task) {
  const at::NoGradGuard no_grad;
  NeedleScore score;
  for (int64_t i = 0; i < task.samples; ++i) {
    const NeedleSample sample = needle_sample(model.tokenizer, haystack, task, i);
    const Tensor ids = to_ids(sample.ids, model.device);
    const int64_t first = sample.answer - 1;  // the token before the number predicts its first
    std::vector<Tensor> rows;
    const PackedBatch asked{.ids = ids.slice(0, 0, -1), .cu_seqlens = make_cu_seqlens({ids.size(0) - 1})};
    for_each_piece(model.config, model.weights, asked, kEvaluationPiece,
                   [&](int64_t begin, const Tensor& hidden) {
                     const int64_t skip = std::max<int64_t>(0, first - begin);
                     if (skip < hidden.size(0)) rows.push_back(hidden.slice(0, skip));
                   });
    const Tensor guess = likeliest_tokens(model.config, model.weights, at::cat(rows));
    const Tensor right = guess.eq(ids.slice(0, sample.answer).to(at::kCPU));
    score.tokens.right += right.sum().item<int64_t>();
    score.tokens.total += right.numel();
    score.numbers.right += right.all().item<bool>() ? 1 : 0;
    ++score.numbers.total;
  }
  return score;
}

}  // namespace godwit
