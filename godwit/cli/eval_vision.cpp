#include "godwit/cli/eval_vision.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/progress.h"
#include "godwit/cli/support.h"
#include "godwit/data/documents.h"
#include "godwit/data/sample.h"
#include "godwit/infer/generate.h"

namespace godwit::cli {
namespace {

using nlohmann::json;

struct Question {
  std::string task;
  std::vector<int32_t> prompt;
  MediaList media;
  std::string answer;
  int64_t answer_tokens = 0;
};

// A line {"task", "content", "answer"}, encoded as for training.
Question read_question(const LoadedModel& model, const data::Document& document) {
  const json line = json::parse(document.text, /*cb=*/nullptr, /*allow_exceptions=*/false);
  check(document.chat && line.is_object() && line.contains("content") && line.contains("answer"),
        "{}: expected {{\"content\": [...], \"answer\": ...}}", document.where);
  check(!line.contains("task") || line.at("task").is_string(), "{}: task: expected text", document.where);
  const data::ChatSample sample = data::document_sample(model.tokenizer, model.images, document);
  Question q;
  q.task = line.value("task", "all");
  const auto end = std::ranges::find(sample.trained, 1) - sample.trained.begin();
  q.prompt.assign(sample.ids.begin(), sample.ids.begin() + end);
  check(!q.prompt.empty(), "{}: a question without a word or picture", document.where);
  q.answer = sample.trained_text;
  q.answer_tokens = static_cast<int64_t>(sample.ids.size()) - end;
  for (const data::MediaEntry& entry : sample.media) {
    const std::vector<std::string_view> frames(entry.frames.begin(), entry.frames.end());
    q.media.push_back(read_frames(*model.config.vision, model.images, frames, document.where));
  }
  return q;
}

std::vector<Question> read_questions(const EvalArgs& args, const LoadedModel& model) {
  std::vector<Question> all;
  std::map<std::string, int64_t> counts;
  for (const auto& file : data::list_inputs(std::vector<std::filesystem::path>{args.data})) {
    data::read_documents(file, [&](const data::Document& document, uint64_t) {
      if (document.text.empty()) return;
      Question q = read_question(model, document);
      if (args.samples == 0 || counts[q.task]++ < args.samples) all.push_back(std::move(q));
    });
  }
  check(!all.empty(), "--data {}: no questions", args.data);
  return all;
}

enum class Arm { kPictures, kBlank, kShuffled };
constexpr std::array kArms = {Arm::kPictures, Arm::kBlank, Arm::kShuffled};
constexpr std::array kArmNames = {"accuracy", "blank", "shuffled"};

bool same_shape(const MediaList& a, const MediaList& b) {
  return std::ranges::equal(
      a, b, {}, [](const auto& item) { return std::pair(item->grid.frames, item->tokens); },
      [](const auto& item) { return std::pair(item->grid.frames, item->tokens); });
}

// Pictures of one grey.
MediaList blank(const MediaList& media) {
  MediaList out;
  for (const auto& item : media) {
    auto grey = std::make_shared<MediaItem>(*item);
    std::ranges::fill(grey->patches, 0.0f);
    grey->hash = 0;
    out.push_back(std::move(grey));
  }
  return out;
}

// Those of the next question of the task with pictures of the same size and another answer; its own where
// there is none.
MediaList exchanged(const std::vector<Question>& all, size_t i) {
  for (size_t step = 1; step < all.size(); ++step) {
    const Question& other = all[(i + step) % all.size()];
    if (other.task == all[i].task && other.answer != all[i].answer && same_shape(other.media, all[i].media))
      return other.media;
  }
  return all[i].media;
}

// Whether each question was answered, character for character.
std::vector<bool> answered(const LoadedModel& model, const std::vector<Question>& questions, Arm arm) {
  int64_t longest = 0;
  for (const Question& q : questions)
    longest = std::max(longest, static_cast<int64_t>(q.prompt.size()) + q.answer_tokens + 8);
  constexpr int64_t kTogether = 32;
  Engine engine(model, {.max_sequences = kTogether,
                        .cache_tokens = kTogether * (longest + 2 * kLatentPage),
                        .prefill_tokens = std::max<int64_t>(2048, longest),
                        .prefix = {.max_bytes = 0}});
  std::vector<std::vector<int32_t>> drawn(questions.size());
  for (size_t i = 0; i < questions.size(); ++i) {
    const Question& q = questions[i];
    Request request{.prompt = q.prompt,
                    .media = arm == Arm::kPictures ? q.media
                             : arm == Arm::kBlank  ? blank(q.media)
                                                   : exchanged(questions, i),
                    .sampling = {.temperature = 0},
                    .max_tokens = q.answer_tokens + 4,
                    .stop_ids = text_stop_ids(model)};
    request.on_token = [&drawn, i](int64_t, const DrawnToken& token) {
      drawn[i].push_back(token.id);
      return true;
    };
    engine.submit(std::move(request));
  }
  engine.run_until_idle();
  std::vector<bool> right;
  for (size_t i = 0; i < questions.size(); ++i)
    right.push_back(model.tokenizer.decode(drawn[i]) == questions[i].answer);
  return right;
}

}  // namespace

json eval_vision(const EvalArgs& args, const LoadedModel& model) {
  check(!args.data.empty(), "eval vision: --data names the questions (JSONL)");
  check(model.config.vision && model.weights.vision, "{}: this model takes no images", args.model);
  const std::vector<Question> questions = read_questions(args, model);
  std::map<std::string, json> tasks;
  std::map<std::string, std::map<std::string, int64_t>> answers;
  for (const Question& q : questions) ++answers[q.task][q.answer];
  ProgressBar progress({.label = "vision", .total = std::size(kArms)});
  for (size_t arm = 0; arm < kArms.size(); ++arm) {
    progress.update(static_cast<int64_t>(arm), kArmNames[arm]);
    const std::vector<bool> right = answered(model, questions, kArms[arm]);
    std::map<std::string, std::pair<int64_t, int64_t>> counts;  // right, all
    for (size_t i = 0; i < questions.size(); ++i) {
      counts[questions[i].task].first += right[i] ? 1 : 0;
      ++counts[questions[i].task].second;
    }
    for (const auto& [task, count] : counts) {
      tasks[task][kArmNames[arm]] = static_cast<double>(count.first) / static_cast<double>(count.second);
      tasks[task]["samples"] = count.second;
    }
  }
  progress.finish();
  json list = json::array();
  for (auto& [task, result] : tasks) {
    const auto& counts = answers[task];
    const auto most = std::ranges::max_element(counts, {}, [](const auto& c) { return c.second; });
    result["chance"] = static_cast<double>(most->second) / result["samples"].get<double>();
    result["name"] = task;
    list.push_back(result);
  }
  return {{"task", "vision"}, {"data", args.data}, {"tasks", list}};
}

void print_vision(const json& r) {
  print_out(
      "exact answers; the same questions with grey pictures, with another question's; the likeliest "
      "answer\n\n");
  print_out("{:>10}  {:>8}  {:>9}  {:>9}  {:>9}  {:>9}\n", "task", "samples", "accuracy", "blank", "shuffled",
            "chance");
  for (const json& t : r["tasks"]) {
    print_out("{:>10}  {:>8}  {:>7.1f} %  {:>7.1f} %  {:>7.1f} %  {:>7.1f} %\n", t["name"].get<std::string>(),
              t["samples"].get<int64_t>(), 100 * t["accuracy"].get<double>(), 100 * t["blank"].get<double>(),
              100 * t["shuffled"].get<double>(), 100 * t["chance"].get<double>());
  }
}

}  // namespace godwit::cli
