// A run directory as a report needs it: columns of numbers from metrics.jsonl, what record.json adds.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "godwit/report/episodes.h"

namespace godwit::report {

using Column = std::vector<double>;  // one value a row; NaN where the row has none
// One list a row; empty where the row has none.
using ListColumn = std::vector<std::vector<double>>;

struct Stage {
  std::string name;
  double context = 0;
  size_t first = 0, last = 0;  // rows
};

struct Gate {
  std::string stage;
  double context = 0, before = 0, after = 0, limit = 0;
  double step = 0;
  bool passed() const { return after - before <= limit; }
};

struct PositionLoss {
  double begin = 0, end = 0, nats = 0;  // tokens begin .. end - 1 of the window
};

struct Run {
  std::string name;                         // the directory's
  std::map<std::string, Column> numbers;    // every key that holds a number somewhere
  std::map<std::string, ListColumn> lists;  // every key that holds a list of numbers somewhere
  std::vector<Stage> stages;
  std::vector<Gate> gates;
  std::vector<PositionLoss> positions;
  std::vector<std::vector<double>> expert_load;  // [MoE layer][expert], load over mean load
  std::vector<Episode> episodes;                 // of reinforcement learning
  std::vector<std::string> notes;  // what a reader should know: a cut line, values that are not numbers

  size_t rows() const;
  bool learns_by_reward() const { return numbers.contains("reward"); }
  const Column& column(const std::string& key) const;    // empty if there is none
  const ListColumn& list(const std::string& key) const;  // empty if there is none
};

// Throws Error that names the file and the line. A last line that an interruption cut short is left out with
// a note.
Run read_run(const std::filesystem::path& directory);

}  // namespace godwit::report
