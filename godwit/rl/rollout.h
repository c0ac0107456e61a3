// Episodes over the inference engine: token in, token out. What the model draws is kept as drawn; what the
// environment answers is appended behind it and nothing is ever encoded twice.
//
// A phase keeps `groups` tasks with `samples` episodes each active. It ends when a share of them has finished
// and at least one group is complete (Kimi K3 report, arXiv:2607.24653 section 4); episodes that are under
// way are suspended at the token where they are, and go on first in the next phase, with the weights of then.
// No token is older than max_staleness steps when its group is trained on: a phase does not end before the
// groups are complete that would become too old.
//
// What a suspended episode has read (KDA states, convolutions, latents) is kept or not. Under the same
// weights, after a pause within a phase, it goes on from there, bit for bit as if nothing had happened. Under
// new weights it reads its tokens anew; or with keep_states it goes on from the state that older weights
// made, which costs nothing however long it is. Tokens drawn on such a state are marked (Segment::state), and
// no state is used that is older than max_staleness steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "godwit/infer/engine.h"
#include "godwit/rl/environment.h"
#include "godwit/rl/trajectory.h"

namespace godwit::rl {

struct EnvironmentChoice {
  std::string name;
  std::string options = "{}";  // a JSON object
  double weight = 1;           // share of the tasks, relative to the others
  std::string teacher;         // a model directory: on-policy distillation (distill.h); empty: none
  bool operator==(const EnvironmentChoice&) const = default;
};

struct RolloutOptions {
  std::vector<EnvironmentChoice> environments;
  int64_t groups = 8, samples = 8;
  double finish_share = 1;
  int64_t max_staleness = 1;
  double temperature = 1;
  int64_t turn_tokens = 128;  // of one assistant's turn
  int64_t context = 1024;     // of a whole trajectory
  bool thinking = false;
  int64_t concurrent = 32;     // episodes in the engine at a time
  int64_t prefill_tokens = 0;  // of prompts and observations, read in one step; 0: as the engine has it
  bool keep_states = false;    // suspended episodes go on from what they have read, with new weights too
  uint64_t seed = 0;           // of tasks and draws
  bool operator==(const RolloutOptions&) const = default;
};

struct RolloutProgress {
  int64_t finished = 0, active = 0;  // episodes
  int64_t drawn = 0;                 // tokens in this phase
};

class Rollouts {
 public:
  // `model`'s weights may change between phases, in place.
  Rollouts(const LoadedModel& model, RolloutOptions options);
  ~Rollouts();
  Rollouts(const Rollouts&) = delete;
  Rollouts& operator=(const Rollouts&) = delete;

  // One phase with the weights of `version`. Complete groups, in the order of their ids; each vector has
  // `samples` trajectories, all done. Throws Error when the engine fails.
  //
  // `progress` is called after every step of the engine; where it returns false the phase pauses there: the
  // result is empty, paused() is true, and run() with the same version goes on at the same token, after save
  // and load in another process too.
  std::vector<std::vector<Trajectory>> run(int64_t version,
                                           const std::function<bool(const RolloutProgress&)>& progress = {});
  bool paused() const { return paused_; }

  // Those that are not finished, or wait for others of their group, with tokens that the last phase's weights
  // drew on what they themselves had read.
  std::vector<const Trajectory*> waiting() const;

  // What the last phase drew, drawn again with teacher forcing by the same calls of the engine in the same
  // batches and order: the weights must be those of then. For devices where the bits of a row depend on its
  // batch and the same calls give the same bits. By group and place in it, ascending in `at`, the token's
  // index.
  struct Token {
    int64_t at = 0;
    double logp = 0;
  };
  using Repeated = std::map<std::pair<int64_t, int64_t>, std::vector<Token>>;
  Repeated repeat();

  // Suspended episodes with their environments and states, and which task comes next. Not within run().
  struct Saved {
    std::string episodes;                      // JSON
    std::map<std::string, at::Tensor> states;  // what they have read, where it is kept
  };
  Saved save() const;
  void load(const Saved& saved);

  int64_t suspended() const;  // episodes
  EngineStats engine_stats() const { return engine_.stats(); }

 private:
  struct Episode;
  struct Group;

  std::unique_ptr<Environment> make(size_t choice) const;
  size_t choose(int64_t group) const;
  void start_group();
  void submit_group(Group& group);
  void submit(Episode& episode);
  void ask(Request request, std::vector<Episode*> episodes);
  Request request_for(const Episode& episode) const;
  void begin_segment(Episode& episode);
  void drop_old_state(Episode& episode) const;
  bool keeps_state(const Episode& episode) const;
  bool take(Episode& episode, const DrawnToken& token);
  void finish(Episode& episode, const Finish& finish);
  void end_turn(Episode& episode);
  void end_episode(Episode& episode, const std::string& reason, double success);
  bool may_stop() const;
  void suspend();
  void go_on();
  std::vector<std::vector<Trajectory>> take_complete();

  const LoadedModel& model_;
  RolloutOptions options_;
  Engine engine_;
  std::vector<int32_t> specials_;
  int32_t end_id_;
  std::vector<std::unique_ptr<Group>> groups_;
  int64_t next_group_ = 0, version_ = 0, drawn_ = 0;
  int64_t next_order_ = 0;       // of episodes given to the engine
  bool paused_ = false;          // within a phase
  bool suspending_ = false;      // what the engine ends now will go on
  std::vector<Episode*> ready_;  // their turn is over
  std::string error_;            // of the engine
  // What the phase asked of the engine, for repeat().
  struct Asked {
    int64_t step = 0;                                // steps of the engine before it in the phase
    Request request;                                 // without its callbacks
    std::vector<std::pair<int64_t, int64_t>> whose;  // of each choice
    std::vector<std::vector<int32_t>> drawn;         // by each choice
  };
  std::vector<Asked> asked_;
  int64_t engine_steps_ = 0;  // of the phase
};

// The chat of a task as ids, and the options it was written with.
std::vector<int32_t> encode_task(const Task& task, bool thinking, const Tokenizer& tokenizer);

}  // namespace godwit::rl
