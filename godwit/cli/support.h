// What several subcommands need: device, output, numbers for people.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "godwit/cli/commands.h"
#include "godwit/infer/engine.h"

namespace godwit::cli {

// Sets the number of threads and gives the device, of several GPUs that of `local_rank`. Error if it is not
// there.
c10::Device apply_device(const DeviceArgs& args, int64_t local_rank = 0);

// "f32", "bf16", or empty for the checkpoint's own.
std::optional<c10::ScalarType> scalar_type_option(const std::string& dtype);

LoadedModel load(const ModelArgs& args);
SamplingParams sampling_params(const ModelArgs& args);
// An engine for one sequence of up to `tokens` tokens, as far as the model's context goes.
EngineOptions single_sequence(const LoadedModel& model, int64_t tokens, int64_t draft_tokens = 0);

// The picture in a file, for the model.
std::shared_ptr<const MediaItem> load_picture(const LoadedModel& model, const std::string& path);

// To stdout at once. A closed pipe ends the process quietly (main.cpp), any other fault is an Error.
void write_out(std::string_view text);
template <class... Args>
void print_out(fmt::format_string<Args...> format, Args&&... args) {
  write_out(fmt::format(format, std::forward<Args>(args)...));
}
// One line. Text that is not UTF-8 (a path) is replaced, not refused.
void print_json(const nlohmann::json& value);

std::string human_bytes(double bytes);  // "1.42 TiB"
std::string human_count(double n);      // "2.78 T", "104.19 B", "12.30 M"

// Everything on stdin.
std::string read_stdin();
// A JSON list of token ids from 0 to below `vocab_size`; `where` names the source in errors.
std::vector<int32_t> parse_ids(std::string_view json, int64_t vocab_size, const std::string& where);

}  // namespace godwit::cli
