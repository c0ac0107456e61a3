// A sampled episode as the trainer needs it: the ids exactly as they were sampled or appended, never encoded
// again, and for each sampled one its log-probability and the version of the weights that drew it.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "godwit/rl/advantage.h"

namespace godwit {
struct MediaItem;
}

namespace godwit::rl {

// Tokens [begin, end) were drawn one after another by the engine, which had read [0, begin) as a prompt.
struct Segment {
  int64_t begin = 0, end = 0;
  int64_t version = 0;  // of the weights: steps of the trainer before
  int64_t state = 0;    // of the oldest weights that read what lies before; less than `version` where a
                        // suspended episode went on from its state

  // Whether the weights of `present` have read all of it and drawn it: then their log-probabilities are its
  // own.
  [[nodiscard]] bool is_of(int64_t present) const { return version == present && state == present; }
};

// One assistant's turn, tokens [begin, end), and what the environment made of it.
struct TurnRecord {
  int64_t begin = 0, end = 0;
  uint64_t state = 0;  // Environment::state_hash before it
  double reward = 0;
  int64_t calls = 0, faults = 0, wrong = 0, redundant = 0, checked = 0, valid = 0;
  int64_t malformed = 0;  // faults of form that the chat parser repaired
};

struct Trajectory {
  uint64_t task_seed = 0;
  int64_t environment = 0;        // place in RolloutOptions::environments
  int64_t group = 0, sample = 0;  // sample: place in its group
  int64_t base_tokens = 0;        // of the task; 0 = no budget
  std::vector<int32_t> ids;
  // The pictures behind the <|media_pad|> tokens, in order: as the environment gave them (data URLs), and as
  // the tower takes them. The latter are not saved.
  std::vector<std::string> pictures;
  std::vector<std::shared_ptr<const MediaItem>> media;
  std::vector<double> logp;  // one for each id: policy_logprob where the model drew it, 0 elsewhere
  std::vector<Segment> segments;
  std::vector<TurnRecord> turns;
  bool done = false;
  double success = 0;
  std::string reason;  // why it ended: the environment's word, "length" or "room"

  int64_t drawn() const;           // tokens that the model wrote
  int64_t oldest_version() const;  // of its segments; of one without tokens: a very large number
  int64_t total(int64_t TurnRecord::*part) const;
  EpisodeOutcome outcome() const;
};

void to_json(nlohmann::json& json, const Trajectory& trajectory);
void from_json(const nlohmann::json& json, Trajectory& trajectory);

}  // namespace godwit::rl
