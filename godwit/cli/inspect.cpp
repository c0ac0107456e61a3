// `godwit inspect PATH`: what a model directory, a training checkpoint, packed data, a safetensors file or a
// picture holds.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "godwit/base/check.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/data/dataset.h"
#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/image_processor.h"
#include "godwit/io/jsonl.h"
#include "godwit/io/safetensors.h"
#include "godwit/io/snapshot.h"
#include "godwit/model/layout.h"
#include "godwit/plan/plan.h"

namespace godwit::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Tensors that differ only in the numbers of their names.
struct Group {
  int64_t count = 0;
  uint64_t bytes = 0;
};
// Pattern, dtype and shape, to group.
using Groups = std::map<std::tuple<std::string, std::string, std::vector<int64_t>>, Group>;

// "model.layers.3.mlp.up_proj.weight" -> "model.layers.*.mlp.up_proj.weight".
std::string pattern_of(const std::string& name) {
  std::string out;
  for (size_t at = 0; at <= name.size();) {
    const size_t end = std::min(name.find('.', at), name.size());
    const std::string part = name.substr(at, end - at);
    const bool number =
        !part.empty() && std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
    out += (at == 0 ? "" : ".") + (number ? "*" : part);
    at = end + 1;
  }
  return out;
}

void add(const io::StoredTensor& tensor, Groups& groups) {
  Group& group = groups[{pattern_of(tensor.name), std::string(io::dtype_name(tensor.dtype)), tensor.shape}];
  ++group.count;
  group.bytes += tensor.end - tensor.begin;
}

json tensors_json(const Groups& groups) {
  json rows = json::array();
  int64_t count = 0;
  uint64_t bytes = 0;
  std::map<std::string, uint64_t> by_dtype;
  for (const auto& [key, group] : groups) {
    const auto& [pattern, dtype, shape] = key;
    rows.push_back({{"name", pattern},
                    {"count", group.count},
                    {"dtype", dtype},
                    {"shape", shape},
                    {"bytes", group.bytes}});
    count += group.count;
    bytes += group.bytes;
    by_dtype[dtype] += group.bytes;
  }
  return {{"count", count}, {"bytes", bytes}, {"bytes_by_dtype", by_dtype}, {"groups", rows}};
}

void print_tensors(const json& tensors) {
  print_out("{:>7}  {:<8} {:<22} {:>11}  tensor\n", "count", "dtype", "shape", "bytes");
  for (const json& row : tensors["groups"]) {
    print_out("{:>7}  {:<8} {:<22} {:>11}  {}\n", row["count"].get<int64_t>(),
              row["dtype"].get<std::string>(), io::shape_text(row["shape"].get<std::vector<int64_t>>()),
              human_bytes(row["bytes"].get<double>()), row["name"].get<std::string>());
  }
  print_out("{:>7}  {:<31} {:>11}\n", tensors["count"].get<int64_t>(), "in all",
            human_bytes(tensors["bytes"].get<double>()));
}

json config_json(const ModelConfig& config) {
  const auto kda = std::count(config.kda_layer.begin(), config.kda_layer.end(), true);
  const Plan plan = make_plan(config, config.max_position > 0 ? config.max_position : 1);
  const char* const residuals[] = {"none", "block", "full"};
  return {{"model_type", config.model_type},
          {"dtype", config.dtype},
          {"vocab_size", config.vocab_size},
          {"hidden", config.hidden},
          {"layers", config.layers},
          {"kda_layers", kda},
          {"mla_layers", config.layers - kda},
          {"experts", config.moe.experts},
          {"experts_per_token", config.moe.experts_per_token},
          {"shared_experts", config.moe.shared_experts},
          {"latent", config.moe.latent},
          {"attn_res", residuals[static_cast<int>(config.attn_res)]},
          {"max_position", config.max_position},
          {"vision", config.vision.has_value()},
          {"parameters", plan.parameters.total},
          {"active_parameters", plan.parameters.active}};
}

void print_config(const json& c) {
  const auto number = [&](const char* key) { return c[key].get<int64_t>(); };
  print_out("{} {}, vocabulary {}, width {}, {} layers ({} KDA, {} MLA), AttnRes {}{}\n",
            c["model_type"].get<std::string>(), c["dtype"].get<std::string>(), number("vocab_size"),
            number("hidden"), number("layers"), number("kda_layers"), number("mla_layers"),
            c["attn_res"].get<std::string>(), c["vision"].get<bool>() ? ", vision" : "");
  if (number("experts") > 0) {
    print_out("{} experts, {} a token, {} shared, latent width {}\n", number("experts"),
              number("experts_per_token"), number("shared_experts"), number("latent"));
  }
  print_out("{} parameters, {} active a token\n\n", human_count(c["parameters"].get<double>()),
            human_count(c["active_parameters"].get<double>()));
}

bool holds_checkpoint(const fs::path& directory) {
  return fs::exists(directory / io::kSingleCheckpointFile) ||
         fs::exists(directory / io::kCheckpointIndexFile);
}

// Whether the tensors are those of config.json.
json fit_json(const ModelConfig& config, const io::CheckpointDir& checkpoint) {
  const FoundModel found = find_model(config, checkpoint);
  const bool packed = std::any_of(found.params.begin(), found.params.end(),
                                  [](const StoredParam& param) { return param.packed; });
  return {{"complete", found.differences.empty()},
          {"differences", found.differences},
          {"experts", packed ? "mxfp4" : "plain"},
          {"vision", found.vision},
          {"warnings", found.warnings}};
}

void print_fit(const json& fit) {
  const auto vision = fit["vision"].get<int64_t>();
  if (fit["complete"].get<bool>())
    write_out("every tensor of config.json is here and no other");
  else
    print_out("the tensors do not fit config.json: {}", fit["differences"].get<std::string>());
  if (fit["experts"] == "mxfp4") write_out("; routed experts in MXFP4");
  if (vision > 0) print_out("; {} of the vision tower and projector", vision);
  write_out("\n");
  for (const json& warning : fit["warnings"]) print_out("warning: {}\n", warning.get<std::string>());
  write_out("\n");
}

// A link to nothing counts: it is an error of the directory, not a directory without a configuration.
bool configured_at(const fs::path& directory) {
  return fs::exists(fs::symlink_status(directory / "config.json"));
}

json inspect_model(const fs::path& path) {
  json out = {{"kind", "model"}, {"path", path.string()}};
  const bool configured = configured_at(path);
  const ModelConfig config = configured ? load_model_config(path.string()) : ModelConfig{};
  if (configured) out["config"] = config_json(config);
  if (!holds_checkpoint(path)) return out;
  const io::CheckpointDir checkpoint(path);
  if (configured) out["fit"] = fit_json(config, checkpoint);
  Groups groups;
  checkpoint.for_each([&](const io::StoredTensor& tensor) { add(tensor, groups); });
  out["files"] = checkpoint.shard_files().size();
  out["tensors"] = tensors_json(groups);
  return out;
}

json inspect_file(const fs::path& path) {
  const io::SafetensorsFile file(path);
  Groups groups;
  for (const io::StoredTensor& tensor : file.tensors()) add(tensor, groups);
  return {{"kind", "safetensors"},
          {"path", path.string()},
          {"metadata", file.metadata()},
          {"tensors", tensors_json(groups)}};
}

// RUN/checkpoints/step-N.
json inspect_snapshot(const fs::path& path) {
  const json listed = io::read_json(path / io::kSnapshotFile);
  Groups groups;
  for (const auto& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() != ".safetensors") continue;
    const io::SafetensorsFile file(entry.path());
    for (const io::StoredTensor& tensor : file.tensors()) add(tensor, groups);
  }
  return {{"kind", "checkpoint"},
          {"path", path.string()},
          {"step", listed.value("step", int64_t{0})},
          {"tensors", tensors_json(groups)}};
}

json inspect_image(const fs::path& path) {
  const io::MappedFile file(path);
  const io::ImageInfo info = io::image_info(file.bytes(), path.string());
  const io::ImagePlan plan = io::plan_image(info.width, info.height, {});
  return {{"kind", "image"},
          {"path", path.string()},
          {"format", info.format},
          {"width", info.width},
          {"height", info.height},
          {"resized", {plan.width, plan.height}},
          {"patches", {plan.grid_width, plan.grid_height}},
          {"tokens", plan.tokens}};
}

void print_image(const json& found) {
  print_out("{}, {} x {} pixels; resized to {} x {}, {} x {} patches, {} tokens\n",
            found["format"].get<std::string>(), found["width"].get<int64_t>(), found["height"].get<int64_t>(),
            found["resized"][0].get<int64_t>(), found["resized"][1].get<int64_t>(),
            found["patches"][0].get<int64_t>(), found["patches"][1].get<int64_t>(),
            found["tokens"].get<int64_t>());
}

json dataset_json(const data::TokenDataset& dataset) {
  uint64_t longest = 0;
  for (uint64_t d = 0; d < dataset.documents(); ++d) longest = std::max(longest, dataset.document_tokens(d));
  const data::Manifest& manifest = dataset.manifest();
  return {{"documents", dataset.documents()},    {"tokens", dataset.tokens()},
          {"text_bytes", dataset.text_bytes()},  {"longest_document", longest},
          {"shards", manifest.shards.size()},    {"vocab_size", manifest.vocab_size},
          {"tokenizer", manifest.tokenizer_hash}};
}

json inspect_data(const fs::path& path) {
  json out = {{"kind", "data"}, {"path", path.string()}, {"train", dataset_json(*data::open_train(path))}};
  if (const auto heldout = data::open_heldout(path)) out["heldout"] = dataset_json(*heldout);
  return out;
}

void print_data(const json& found) {
  for (const char* part : {"train", "heldout"}) {
    if (!found.contains(part)) continue;
    const json& d = found[part];
    const auto number = [&](const char* key) { return d[key].get<uint64_t>(); };
    print_out("{:<8} {} documents, the longest of {} tokens; {} tokens in {} shards; {} of text\n", part,
              number("documents"), number("longest_document"), number("tokens"), number("shards"),
              human_bytes(d["text_bytes"].get<double>()));
  }
  print_out("vocabulary of {} ids, tokenizer {}\n", found["train"]["vocab_size"].get<int64_t>(),
            found["train"]["tokenizer"].get<std::string>());
}

bool names_picture(const fs::path& path) {
  constexpr std::array kExtensions = {".png", ".jpg", ".jpeg", ".webp"};
  return std::ranges::find(kExtensions, path.extension()) != kExtensions.end();
}

bool begins_as_picture(const fs::path& path) {
  if (!fs::is_regular_file(path)) return false;
  std::ifstream file(path, std::ios::binary);
  std::string head(12, '\0');
  file.read(head.data(), 12);
  return head.starts_with("\xFF\xD8\xFF") || head.starts_with("\x89PNG") ||
         (head.starts_with("RIFF") && head.ends_with("WEBP"));
}

json inspect(const fs::path& path) {
  std::error_code error;  // of links in a circle, say
  check(fs::exists(path, error), "{}: {}", path.string(),
        error ? error.message() : "no such file or directory");
  if (fs::is_directory(path)) {
    if (fs::exists(path / data::kManifestFile)) return inspect_data(path);
    if (fs::exists(path / io::kSnapshotFile)) return inspect_snapshot(path);
    check(configured_at(path) || holds_checkpoint(path),
          "{}: neither a model nor packed data here (no config.json, safetensors or manifest.json)",
          path.string());
    return inspect_model(path);
  }
  if (path.extension() == ".safetensors") return inspect_file(path);
  if (names_picture(path) || begins_as_picture(path)) return inspect_image(path);
  fail("{}: expected a directory, a .safetensors file or a picture (.png, .jpg, .webp)", path.string());
}

}  // namespace

int run_inspect(const InspectArgs& args) {
  const json found = inspect(args.path);
  if (args.json) {
    print_json(found);
    return 0;
  }
  if (found["kind"] == "data") {
    print_data(found);
    return 0;
  }
  if (found["kind"] == "image") {
    print_image(found);
    return 0;
  }
  if (found.contains("config")) print_config(found["config"]);
  if (found.contains("step")) print_out("checkpoint of step {}\n\n", found["step"].get<int64_t>());
  if (found.contains("fit")) print_fit(found["fit"]);
  if (found.contains("metadata")) {
    for (const auto& [key, value] : found["metadata"].items())
      print_out("{}: {}\n", key, value.get<std::string>());
  }
  if (found.contains("tensors"))
    print_tensors(found["tensors"]);
  else
    write_out("no weights here\n");
  return 0;
}

}  // namespace godwit::cli
