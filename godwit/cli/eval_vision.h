// `godwit eval vision`: answers to questions about pictures, beside the same questions with blank and with
// exchanged pictures.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "godwit/cli/commands.h"
#include "godwit/infer/model.h"

namespace godwit::cli {

nlohmann::json eval_vision(const EvalArgs& args, const LoadedModel& model);
void print_vision(const nlohmann::json& result);

}  // namespace godwit::cli
