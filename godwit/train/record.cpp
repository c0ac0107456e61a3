#include "godwit/train/record.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "godwit/base/file.h"
#include "godwit/io/file.h"

namespace godwit {

using nlohmann::json;

RunRecord::RunRecord(const std::filesystem::path& directory) : path_(directory / "record.json") {
  if (std::filesystem::exists(path_))
    json_ = json::parse(read_file(path_), nullptr, /*allow_exceptions=*/false);
  if (!json_.is_object()) json_ = json::object();
}

void RunRecord::write() const {
  io::write_file_atomic(path_, json_.dump() + "\n");
}

void RunRecord::gate(const GateRecord& gate) {
  json list = json::array();
  if (json_.contains("gates") && json_["gates"].is_array()) {
    for (const json& other : json_["gates"])
      if (other.is_object() && other.value("stage", json()) != gate.stage) list.push_back(other);
  }
  list.push_back({{"stage", gate.stage},
                  {"context", gate.context},
                  {"before", gate.before},
                  {"after", gate.after},
                  {"limit", gate.limit},
                  {"step", gate.step}});
  json_["gates"] = list;
  write();
}

void RunRecord::loss_by_position(const std::vector<LossByPosition::Bucket>& buckets) {
  json_["loss_by_position"] = json::array();
  for (const LossByPosition::Bucket& b : buckets)
    json_["loss_by_position"].push_back(json::array({b.begin, b.end, b.nats}));
  write();
}

void RunRecord::expert_load(const std::vector<at::Tensor>& load_E) {
  json_["expert_load"] = json::array();
  for (const at::Tensor& layer : load_E) {
    const at::Tensor load = layer.detach().to(at::kCPU, at::kDouble).contiguous();
    const double mean = std::max(load.mean().item<double>(), 1e-300);
    json row = json::array();
    const auto* values = load.const_data_ptr<double>();
    for (int64_t e = 0; e < load.numel(); ++e) row.push_back(std::round(values[e] / mean * 1000) / 1000);
    json_["expert_load"].push_back(row);
  }
  write();
}

}  // namespace godwit
