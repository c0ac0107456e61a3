// Which keys a configuration can have: what is laid over one from outside must not be misspelt.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace godwit {

// The first key of `changes` (laid over a configuration's root or its text_config) that no configuration has;
// empty if there is none.
std::string unknown_config_key(const nlohmann::json& changes);

}  // namespace godwit
