// The numbers of a run: metrics.jsonl in the run directory, one JSON object a step, and TensorBoard event
// files of the same in tensorboard/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "godwit/train/tensorboard.h"

namespace godwit {

struct MetricsOptions {
  std::filesystem::path directory;
  bool tensorboard = true;
};

class MetricsWriter {
 public:
  explicit MetricsWriter(MetricsOptions options);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // `row` is an object with an integer "step" above that of the row before. The line is in the file when this
  // returns; lines are only ever appended, so that an interruption can cut the last one and nothing else.
  // Numbers that are not finite become null. TensorBoard gets every number, and the largest and the mean of
  // every list of numbers.
  void write(const nlohmann::json& row);

  // Drops everything after the row of `step`, whole or cut short: what going on from a checkpoint at `step`
  // starts with. Throws Error when the file holds anything else than rows in order up to there.
  void truncate_after(int64_t step);

  // To the disk: before a checkpoint that a resume would count on.
  void flush();

 private:
  void open();

  MetricsOptions options_;
  std::filesystem::path path_;
  EventWriter events_;
  int fd_ = -1;
  int64_t end_ = 0;                   // bytes
  std::optional<int64_t> last_step_;  // none: no row yet
};

}  // namespace godwit
