#include "godwit/model/config_keys.h"

#include <nlohmann/json.hpp>

#include "godwit/model/config.h"

namespace godwit {

using nlohmann::json;

std::string unknown_config_key(const json& changes) {
  static const json known = [] {
    json all = preset_json("kimi-k3");
    all.update(to_json(parse_model_config(all, "kimi-k3")), /*merge_objects=*/true);
    all["text_config"].update(preset_json("kimi-linear-48b"), /*merge_objects=*/true);
    all["text_config"]["num_experts_per_tok"] = 0;  // two keys that are read but never written
    all["torch_dtype"] = "";
    all.erase("godwit");  // checked where it is read
    return all;
  }();
  for (const auto& [key, value] : changes.items()) {
    if (key == "godwit") continue;
    const json& text = known["text_config"];
    if (!known.contains(key) && !text.contains(key)) return key;
    const json& here = known.contains(key) && !text.contains(key) ? known[key] : text[key];
    if (!value.is_object() || !here.is_object()) continue;
    for (const auto& [inner, ignored] : value.items()) {
      if (!here.contains(inner)) return key + "." + inner;
    }
  }
  return {};
}

}  // namespace godwit
