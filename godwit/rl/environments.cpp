#include "godwit/rl/environments.h"

#include <map>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"

namespace godwit::rl {
namespace {

std::map<std::string, EnvironmentFactory>& registry() {
  static std::map<std::string, EnvironmentFactory> all = {
      {"calculator", make_calculator}, {"files", make_files},    {"grid", make_grid},
      {"log_search", make_log_search}, {"notes", make_notes},    {"sql", make_sql},
      {"process", make_process},       {"reading", make_reading}};
  return all;
}

}  // namespace

void register_environment(const std::string& name, EnvironmentFactory factory) {
  registry()[name] = std::move(factory);
}

std::unique_ptr<Environment> make_environment(const std::string& name, const nlohmann::json& options) {
  const auto found = registry().find(name);
  std::string names;
  for (const auto& [known, factory] : registry()) names += (names.empty() ? "" : ", ") + known;
  check(found != registry().end(), "there is no environment {}; known: {}", name, names);
  try {
    return found->second(options);
  } catch (const nlohmann::json::exception& e) {
    fail("environment {}: an option is of the wrong type: {}", name, e.what());
  }
}

std::vector<std::string> environment_names() {
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry()) names.push_back(name);
  return names;
}

}  // namespace godwit::rl
