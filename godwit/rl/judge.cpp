#include "godwit/rl/judge.h"

#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/io/jsonl.h"
#include "godwit/rl/episode_text.h"

namespace godwit::rl {

using nlohmann::json;

Judge::Judge(JudgeOptions options)
    : options_(std::move(options)),
      program_(options_.command, options_.folder, {.cpu_s = 1e6}, options_.weaker) {}

std::vector<double> Judge::score(const std::vector<Trajectory>& group, const Tokenizer& tokenizer) {
  json episodes = json::array();
  for (const Trajectory& t : group) {
    episodes.push_back({{"turns", turns_as_text(tokenizer, t)},
                        {"success", t.success},
                        {"tokens", t.drawn()},
                        {"reason", t.reason}});
  }
  const json question = {{"group", group.front().group}, {"episodes", std::move(episodes)}};
  std::string line;
  const Sandbox::Answer how =
      program_.ask(question.dump(-1, ' ', false, json::error_handler_t::replace), options_.answer_s, line);
  check(how == Sandbox::Answer::kLine, "judge: {}",
        how == Sandbox::Answer::kTimeout ? "no answer in time"
        : how == Sandbox::Answer::kFlood ? "an answer without end"
                                         : "the program " + program_.ending());
  io::check_nesting(line, "judge: the answer");
  const json answer = json::parse(line, nullptr, /*allow_exceptions=*/false);
  const bool listed = answer.is_object() && answer.contains("scores") && answer["scores"].is_array() &&
                      answer["scores"].size() == group.size();
  check(listed, "judge: expected {{\"scores\": [{} numbers]}}, got {}", group.size(), line.substr(0, 200));
  std::vector<double> scores;
  for (size_t i = 0; i < group.size(); ++i) {
    const json& score = answer["scores"][i];
    check(score.is_number() && score >= 0.0 && score <= 1.0, "judge: a score is a number from 0 to 1, got {}",
          score.dump());
    const bool too_long = options_.longest > 0 && group[i].drawn() > options_.longest;
    scores.push_back(too_long ? 0.0 : score.get<double>());
  }
  return scores;
}

}  // namespace godwit::rl
