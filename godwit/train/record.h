// What a run knows beside the numbers of its steps: record.json in the run directory, one object, replaced as
// a whole at each change. Writing the same again changes nothing, so a run that resumes may repeat itself.
//   gates              [{stage, context, before, after, limit, step}]   held-out loss around a stage
//   loss_by_position   [[begin, end, nats]]                             held out, at the last stage's context
//   expert_load        [[load over mean load, by expert], by MoE layer] of the last steps
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "godwit/model/evaluate.h"

namespace godwit {

struct GateRecord {
  std::string stage;
  int64_t context = 0, step = 0;
  double before = 0, after = 0, limit = 0;
};

class RunRecord {
 public:
  // Goes on from what an earlier run left in `directory`; a file that is no object is started anew.
  explicit RunRecord(const std::filesystem::path& directory);

  void gate(const GateRecord& gate);  // in the place of an earlier one of the same stage
  void loss_by_position(const std::vector<LossByPosition::Bucket>& buckets);
  void expert_load(const std::vector<at::Tensor>& load_E);  // one a MoE layer, any scale

 private:
  void write() const;

  std::filesystem::path path_;
  nlohmann::json json_;
};

}  // namespace godwit
