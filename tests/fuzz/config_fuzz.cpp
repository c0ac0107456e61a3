// model/config: any JSON as config.json. What is accepted must survive being written and read again.
#include "godwit/model/config.h"

#include <nlohmann/json.hpp>

#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  const auto json = nlohmann::json::parse(fuzz::text(data, size), nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) return 0;
  ModelConfig config;
  if (!fuzz::accepts([&] { config = parse_model_config(json, "config.json"); })) return 0;
  const ModelConfig again = parse_model_config(to_json(config), "written config.json");
  fuzz::require(again.hidden == config.hidden && again.layers == config.layers &&
                again.kda_layer == config.kda_layer);
  return 0;
}
