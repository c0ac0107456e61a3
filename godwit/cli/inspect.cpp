// `godwit inspect PATH`: what a model directory, packed data or a safetensors file holds.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "godwit/base/check.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/data/dataset.h"
#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/safetensors.h"
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

json inspect_model(const fs::path& path) {
  json out = {{"kind", "model"}, {"path", path.string()}};
  if (fs::exists(path / "config.json")) out["config"] = config_json(load_model_config(path.string()));
  if (!holds_checkpoint(path)) return out;
  const io::CheckpointDir checkpoint(path);
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

json inspect(const fs::path& path) {
  check(fs::exists(path), "{}: no such file or directory", path.string());
  if (fs::is_directory(path)) {
    if (fs::exists(path / data::kManifestFile)) return inspect_data(path);
    check(fs::exists(path / "config.json") || holds_checkpoint(path),
          "{}: neither a model nor packed data here (no config.json, safetensors or manifest.json)",
          path.string());
    return inspect_model(path);
  }
  check(path.extension() == ".safetensors", "{}: expected a directory or a .safetensors file", path.string());
  return inspect_file(path);
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
  if (found.contains("config")) print_config(found["config"]);
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
