// A judge: a program of the user's that reads the finished episodes of a group and scores them, for tasks
// that no verifier can decide (Kimi K3 report, arXiv:2607.24653 section 4: a model that reads, keeps a
// rubric, compares). How it comes to its scores is its own affair; it lives as long as the run, so it may
// keep notes.
//
//   -> {"group": 7, "episodes": [{"turns": [...], "success": 1.0, "tokens": 120, "reason": "answered"}, ...]}
//   <- {"scores": [0.5, ...]}        one an episode, 0 to 1
//
// It runs in the sandbox of the environments. A judge that gives no scores is the run's mistake, and an
// error.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "godwit/rl/sandbox.h"
#include "godwit/rl/trajectory.h"
#include "godwit/text/tokenizer.h"

namespace godwit::rl {

struct JudgeOptions {
  std::vector<std::string> command;  // empty: no judge
  std::string folder;                // seen as /program
  double weight = 1;                 // of the score beside the other rewards
  int64_t longest = 0;               // tokens; an episode that wrote more loses: score 0. 0 = no limit
  double answer_s = 60;
  bool weaker = false;
  bool operator==(const JudgeOptions&) const = default;
};

class Judge {
 public:
  // Starts the program.
  explicit Judge(JudgeOptions options);

  // Of one group's finished episodes, in order. Throws Error when the program does not answer as it should.
  std::vector<double> score(const std::vector<Trajectory>& group, const Tokenizer& tokenizer);

 private:
  JudgeOptions options_;
  Sandbox program_;
};

}  // namespace godwit::rl
