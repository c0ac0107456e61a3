// What goes into a checkpoint of the rollouts, and back.
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/infer/prompt_media.h"
#include "godwit/rl/rollout_episode.h"

namespace godwit::rl {
namespace {

using nlohmann::json;
using States = std::map<std::string, at::Tensor>;

// Tensors of a state under names that begin with `prefix`; a layer has a KDA part or latents.
void put_state(const SwappedState& state, const std::string& prefix, States& out) {
  for (size_t layer = 0; layer < state.kda.size(); ++layer) {
    const std::string name = prefix + std::to_string(layer) + ".";
    const auto tensors = state.kda[layer].tensors();
    for (size_t i = 0; i < tensors.size(); ++i)
      if (tensors[i]->defined()) out.emplace(name + "kda" + std::to_string(i), *tensors[i]);
    if (state.rows[layer].defined()) out.emplace(name + "rows", state.rows[layer]);
  }
}

std::shared_ptr<const SwappedState> get_state(const States& all, const std::string& prefix, int64_t length,
                                              int64_t layers) {
  const auto find = [&](const std::string& name) {
    const auto found = all.find(name);
    return found == all.end() ? at::Tensor() : found->second;
  };
  SwappedState state{.length = length, .kda = {}, .rows = {}};
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string name = prefix + std::to_string(layer) + ".";
    state.kda.emplace_back();
    const auto tensors = state.kda.back().tensors();
    for (size_t i = 0; i < tensors.size(); ++i) *tensors[i] = find(name + "kda" + std::to_string(i));
    state.rows.push_back(find(name + "rows"));
    check(tensors.front()->defined() || state.rows.back().defined(),
          "checkpoint: {} is missing of the state of a suspended episode", name);
  }
  return std::make_shared<const SwappedState>(std::move(state));
}

std::string state_prefix(const Trajectory& t) {
  return std::to_string(t.group) + "." + std::to_string(t.sample) + ".";
}

}  // namespace

Rollouts::Saved Rollouts::save() const {
  Saved out;
  json groups = json::array();
  for (const auto& group : groups_) {
    json episodes = json::array();
    for (const auto& e : group->episodes) {
      episodes.push_back({{"trajectory", e->trajectory},
                          {"turn_begin", e->turn_begin},
                          {"draw_seed", e->draw_seed},
                          {"order", e->order},
                          {"turn_over", e->turn_over},
                          {"state_length", e->state ? e->state->length : 0},
                          {"state_version", e->state_version},
                          {"environment", e->environment ? json(e->environment->save()) : json()}});
      if (e->state) put_state(*e->state, state_prefix(e->trajectory), out.states);
    }
    groups.push_back({{"id", group->id},
                      {"draw_seed", group->draw_seed},
                      {"fresh", group->fresh},
                      {"episodes", episodes}});
  }
  out.episodes = json{{"next_group", next_group_}, {"next_order", next_order_}, {"groups", groups}}.dump();
  return out;
}

void Rollouts::load(const Saved& saved) {
  const json episodes = json::parse(saved.episodes);
  next_group_ = episodes.at("next_group");
  next_order_ = episodes.at("next_order");
  groups_.clear();
  for (const json& g : episodes.at("groups")) {
    auto group = std::make_unique<Group>();
    group->id = g.at("id");
    group->draw_seed = g.at("draw_seed");
    group->fresh = g.at("fresh");
    for (const json& e : g.at("episodes")) {
      auto episode = std::make_unique<Episode>();
      episode->trajectory = e.at("trajectory").get<Trajectory>();
      for (const std::string& url : episode->trajectory.pictures)
        episode->trajectory.media.push_back(
            read_image(model_, picture_bytes(url, "checkpoint"), "checkpoint"));
      episode->turn_begin = e.at("turn_begin");
      episode->draw_seed = e.at("draw_seed");
      episode->order = e.at("order");
      episode->turn_over = e.at("turn_over");
      episode->state_version = e.at("state_version");
      if (const int64_t length = e.at("state_length"); length > 0)
        episode->state = get_state(saved.states, state_prefix(episode->trajectory), length,
                                   static_cast<int64_t>(model_.config.kda_layer.size()));
      if (!e.at("environment").is_null()) {
        episode->environment = make(static_cast<size_t>(episode->trajectory.environment));
        episode->environment->load(e.at("environment").get<std::string>());
      }
      group->episodes.push_back(std::move(episode));
    }
    groups_.push_back(std::move(group));
  }
}

}  // namespace godwit::rl
