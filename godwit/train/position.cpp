#include "godwit/train/position.h"

#include <nlohmann/json.hpp>

namespace godwit {

void to_json(nlohmann::json& json, const RunPosition& p) {
  json = {{"stage", p.stage},
          {"stage_step", p.stage_step},
          {"steps", p.steps},
          {"tokens", p.tokens},
          {"elapsed_s", p.elapsed_s},
          {"gate_reference", p.gate_reference},
          {"passed_over", p.passed_over},
          {"recent_losses", p.recent_losses},
          {"recent_max_vio", p.recent_max_vio},
          {"first_max_vio", p.first_max_vio},
          {"before",
           {{"context", p.before.context},
            {"nats_per_token", p.before.nats_per_token},
            {"bits_per_byte", p.before.bits_per_byte},
            {"tokens", p.before.tokens}}}};
}

void from_json(const nlohmann::json& json, RunPosition& p) {
  json.at("stage").get_to(p.stage);
  json.at("stage_step").get_to(p.stage_step);
  json.at("steps").get_to(p.steps);
  json.at("tokens").get_to(p.tokens);
  json.at("elapsed_s").get_to(p.elapsed_s);
  json.at("gate_reference").get_to(p.gate_reference);
  json.at("passed_over").get_to(p.passed_over);
  json.at("recent_losses").get_to(p.recent_losses);
  json.at("recent_max_vio").get_to(p.recent_max_vio);
  json.at("first_max_vio").get_to(p.first_max_vio);
  const nlohmann::json& before = json.at("before");
  before.at("context").get_to(p.before.context);
  before.at("nats_per_token").get_to(p.before.nats_per_token);
  before.at("bits_per_byte").get_to(p.before.bits_per_byte);
  before.at("tokens").get_to(p.before.tokens);
}

}  // namespace godwit
