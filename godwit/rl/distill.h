// On-policy distillation: teachers judge each token that the student drew (Kimi K3 report, arXiv:2607.24653
// section 4: several teachers, one a domain, become one model).
//
//   A_t = weight * clip(log pi_teacher(y_t) - log pi_b(y_t), -limit, limit)
//
// is added to the advantage of token t; pi_b is what the rollout recorded: the student itself where the token
// is of the present version.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "godwit/infer/model.h"
#include "godwit/rl/recipe.h"
#include "godwit/rl/trajectory.h"

namespace godwit::rl {

class Teachers {
 public:
  // Loads the teachers that the environments name, each once. Throws Error when a teacher has another
  // vocabulary than the student.
  Teachers(const RlRecipe& recipe, const LoadedModel& student);

  bool has(const Trajectory& trajectory) const { return !name_of(trajectory).empty(); }

  struct Judgement {
    std::vector<std::vector<double>> advantages;  // one a trajectory, aligned with its ids; empty: no teacher
    double kl =
        0;  // mean over judged tokens of log pi_b - log pi_teacher: an estimate of KL(student || teacher)
    int64_t tokens = 0;  // judged
  };
  Judgement judge(std::span<const Trajectory* const> trajectories) const;

 private:
  const std::string& name_of(const Trajectory& t) const;

  const RlRecipe& recipe_;
  std::map<std::string, LoadedModel> models_;
};

}  // namespace godwit::rl
