// `godwit eval tools`: a model acts in an environment, without learning.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "godwit/cli/commands.h"
#include "godwit/infer/model.h"

namespace godwit::cli {

nlohmann::json eval_tools(const EvalArgs& args, const LoadedModel& model);
void print_tools(const nlohmann::json& result);

}  // namespace godwit::cli
