#include "godwit/rl/distill.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "godwit/base/check.h"
#include "godwit/rl/replay.h"

namespace godwit::rl {

Teachers::Teachers(const RlRecipe& recipe, const LoadedModel& student) : recipe_(recipe) {
  for (const EnvironmentChoice& c : recipe.rollout.environments) {
    if (c.teacher.empty() || models_.contains(c.teacher)) continue;
    LoadedModel model = load_model(c.teacher, student.device, at::kFloat);
    bool same = model.tokenizer.ranks() == student.tokenizer.ranks() &&
                model.config.vocab_size == student.config.vocab_size;
    for (int32_t id = 0; same && id < model.tokenizer.ranks(); ++id)
      same = model.tokenizer.token_bytes(id) == student.tokenizer.token_bytes(id);
    check(same, "teacher {}: its vocabulary is not the student's", c.teacher);
    models_.emplace(c.teacher, std::move(model));
  }
}

const std::string& Teachers::name_of(const Trajectory& t) const {
  return recipe_.rollout.environments.at(static_cast<size_t>(t.environment)).teacher;
}

Teachers::Judgement Teachers::judge(std::span<const Trajectory* const> trajectories) const {
  Judgement out;
  out.advantages.resize(trajectories.size());
  double sum = 0;
  for (const auto& [name, model] : models_) {
    std::vector<const Trajectory*> mine;
    std::vector<size_t> places;
    for (size_t i = 0; i < trajectories.size(); ++i) {
      if (name_of(*trajectories[i]) != name) continue;
      mine.push_back(trajectories[i]);
      places.push_back(i);
    }
    const auto judged = replay(model, mine, rollout_forbidden(model), recipe_.rollout.temperature);
    for (size_t k = 0; k < mine.size(); ++k) {
      const Trajectory& t = *mine[k];
      std::vector<double>& advantages = out.advantages[places[k]];
      advantages.assign(t.ids.size(), 0.0);
      for (const Segment& s : t.segments) {
        for (int64_t at = s.begin; at < s.end; ++at) {
          const double d = judged[k].logp[at] - t.logp[at];
          advantages[at] =
              recipe_.distill.weight * std::clamp(d, -recipe_.distill.limit, recipe_.distill.limit);
          sum -= d;
          ++out.tokens;
        }
      }
    }
  }
  out.kl = out.tokens > 0 ? sum / static_cast<double>(out.tokens) : 0;
  return out;
}

}  // namespace godwit::rl
