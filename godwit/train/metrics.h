// The numbers of a run: metrics.jsonl in the run directory, one JSON object a step, and TensorBoard event
// files of the same in tensorboard/.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>

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

  // `row` is an object with an integer "step". The line is in the file when this returns. A row of the same
  // step as the one before (an evaluation after the step) is merged into its line; an earlier step throws.
  // Numbers that are not finite become null. TensorBoard gets every number, and the largest and the mean of
  // every list of numbers.
  void write(const nlohmann::json& row);

  // Drops every row of a later step, and a last line that an interruption cut short: what --resume from a
  // checkpoint at `step` starts with. Throws Error when the file holds anything else than rows in order.
  void truncate_after(int64_t step);

  // To the disk: before a checkpoint that a resume would count on.
  void flush();

 private:
  void open();

  MetricsOptions options_;
  std::filesystem::path path_;
  EventWriter events_;
  int fd_ = -1;
  int64_t last_offset_ = 0, end_ = 0;  // bytes: of the last row, of the file
  nlohmann::json last_;                // null: no row yet
};

}  // namespace godwit
