// `godwit eval ppl|mqar|niah|vision|tools`.
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/progress.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/eval_tools.h"
#include "godwit/cli/eval_vision.h"
#include "godwit/cli/support.h"
#include "godwit/data/dataset.h"
#include "godwit/data/documents.h"
#include "godwit/data/tokenizer.h"
#include "godwit/infer/evaluate.h"
#include "godwit/infer/recall.h"
#include "godwit/io/compressed_size.h"
#include "godwit/train/recipe.h"

namespace godwit::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kZstdLevel = 19;

// Calls visit with the ids of each document, its [EOS] included, until it returns false.
using DocumentFn = std::function<bool(std::span<const int32_t>)>;

void packed_documents(const fs::path& directory, const Tokenizer& tokenizer, const DocumentFn& visit) {
  std::shared_ptr<const data::TokenDataset> dataset = data::open_heldout(directory);
  if (!dataset) dataset = data::open_train(directory);
  check(dataset->manifest().tokenizer_hash == data::tokenizer_hash(tokenizer),
        "{}: packed with another tokenizer than the model's", directory.string());
  for (uint64_t d = 0; d < dataset->documents(); ++d) {
    std::vector<int64_t> wide(dataset->document_tokens(d));
    dataset->copy_tokens(d, 0, wide);
    if (!visit(std::vector<int32_t>(wide.begin(), wide.end()))) return;
  }
}

void text_documents(const fs::path& path, const Tokenizer& tokenizer, const DocumentFn& visit) {
  const data::PackTokenizer pack = data::pack_tokenizer(tokenizer);
  bool go_on = true;
  for (const fs::path& file : data::list_inputs(std::vector<fs::path>{path})) {
    data::read_documents(file, [&](const data::Document& document, uint64_t) {
      if (document.text.empty() || !go_on) return;
      check(!document.chat, "{}: conversations are measured as packed data (godwit data pack)",
            document.where);
      std::vector<int32_t> ids;
      pack.encode(document.text, ids);
      ids.push_back(pack.eos_id);
      go_on = visit(ids);
    });
  }
}

// A packed data set (its held-out part, if there is one), a text file or a directory of text files.
void for_each_document(const fs::path& path, const Tokenizer& tokenizer, const DocumentFn& visit) {
  check(fs::exists(path), "--data {}: no such file or directory", path.string());
  if (fs::exists(path / data::kManifestFile))
    packed_documents(path, tokenizer, visit);
  else
    text_documents(path, tokenizer, visit);
}

json loss_json(const EvalArgs& args, const TextLoss& loss, uint64_t compressed) {
  json positions = json::array();
  for (const auto& bucket : loss.by_position.buckets()) {
    positions.push_back({{"begin", bucket.begin},
                         {"end", bucket.end},
                         {"tokens", bucket.tokens},
                         {"nats_per_token", bucket.nats}});
  }
  return {{"task", "ppl"},
          {"data", args.data},
          {"context", args.context},
          {"documents", loss.documents},
          {"tokens", loss.tokens},
          {"bytes", loss.bytes},
          {"nats_per_token", loss.nats_per_token()},
          {"perplexity", std::exp(loss.nats_per_token())},
          {"bits_per_byte", loss.bits_per_byte()},
          {"zstd19_bits_per_byte", 8.0 * static_cast<double>(compressed) / static_cast<double>(loss.bytes)},
          {"by_position", positions}};
}

// Without --data: the held-out text of the run that the model comes from, whose recipe stands beside it.
std::string run_data(const std::string& model) {
  const fs::path recipe = fs::weakly_canonical(model).parent_path() / "recipe.toml";
  check(fs::exists(recipe),
        "eval ppl: --data names the text: packed data, a text file or a directory (no run's recipe beside "
        "the model)");
  const Recipe read = load_recipe(recipe.string());
  if (!read.eval.data.empty()) return read.eval.data[0];
  check(!read.data.empty(), "{}: no data", recipe.string());
  return read.data[0].path;
}

json eval_ppl(EvalArgs args, const LoadedModel& model) {
  if (args.data.empty()) args.data = run_data(args.model);
  std::vector<std::vector<int32_t>> documents;
  std::string text;  // what the targets stand for
  int64_t targets = 0;
  const int64_t limit = args.max_tokens;
  for_each_document(args.data, model.tokenizer, [&](std::span<const int32_t> ids) {
    if (limit > 0) ids = ids.first(std::min<size_t>(ids.size(), limit - targets + 1));
    documents.emplace_back(ids.begin(), ids.end());
    if (ids.size() > 1) text += model.tokenizer.decode(ids.subspan(1), /*skip_specials=*/true);
    targets += static_cast<int64_t>(ids.size()) - 1;
    return limit == 0 || targets < limit;
  });
  check(!text.empty(), "--data {}: no text to predict", args.data);
  TextEvaluation evaluation(model, args.context);
  ProgressBar progress({.label = "loss", .total = targets});
  progress.update(0, "");
  for (const auto& document : documents) {
    evaluation.add_document(document);
    progress.update(evaluation.tokens(), "tokens");
  }
  const TextLoss loss = evaluation.finish();
  progress.finish();
  return loss_json(args, loss, io::zstd_size(text, kZstdLevel));
}

void print_ppl(const json& r) {
  print_out("{} documents, {} tokens, {}, in windows of {} tokens\n", r["documents"].get<int64_t>(),
            r["tokens"].get<int64_t>(), human_bytes(r["bytes"].get<double>()), r["context"].get<int64_t>());
  print_out("{:.4f} nats a token (perplexity {:.2f}), {:.3f} bits a byte; zstd -19 on these bytes: {:.3f}\n",
            r["nats_per_token"].get<double>(), r["perplexity"].get<double>(),
            r["bits_per_byte"].get<double>(), r["zstd19_bits_per_byte"].get<double>());
  print_out("\n{:>18}  {:>10}  {:>12}\n", "tokens before", "tokens", "nats a token");
  for (const json& b : r["by_position"]) {
    const std::string range = fmt::format("{} to {}", b["begin"].get<int64_t>(), b["end"].get<int64_t>() - 1);
    print_out("{:>18}  {:>10}  {:>12.4f}\n", range, b["tokens"].get<int64_t>(),
              b["nats_per_token"].get<double>());
  }
}

json eval_mqar(const EvalArgs& args, const LoadedModel& model) {
  json points = json::array();
  const int64_t samples = args.samples > 0 ? args.samples : 32;
  ProgressBar progress({.label = "mqar", .total = args.context / 4});
  for (int64_t pairs = 4; 4 * pairs <= args.context && 2 * pairs <= model.tokenizer.ranks(); pairs *= 2) {
    progress.update(pairs, fmt::format("{} pairs", pairs));
    const MqarTask task{.pairs = pairs, .samples = samples, .seed = args.seed};
    const Score score = mqar(model, task);
    points.push_back({{"pairs", pairs},
                      {"tokens", task.length()},
                      {"queries", score.total},
                      {"accuracy", score.accuracy()},
                      {"chance", 1.0 / static_cast<double>(pairs)}});
  }
  check(!points.empty(), "eval mqar: --context must be at least 16");
  return {{"task", "mqar"}, {"samples", samples}, {"seed", args.seed}, {"points", points}};
}

void print_mqar(const json& r) {
  print_out(
      "accuracy of the likeliest token where a value is to follow its key ({} sequences a row;\n"
      "chance: a guess among the values seen)\n\n{:>7}  {:>7}  {:>9}  {:>8}\n",
      r["samples"].get<int64_t>(), "pairs", "tokens", "accuracy", "chance");
  for (const json& p : r["points"]) {
    print_out("{:>7}  {:>7}  {:>7.1f} %  {:>6.1f} %\n", p["pairs"].get<int64_t>(), p["tokens"].get<int64_t>(),
              100 * p["accuracy"].get<double>(), 100 * p["chance"].get<double>());
  }
}

// Text as ids, at least `tokens` of them where there is so much.
std::vector<int32_t> haystack(const EvalArgs& args, const Tokenizer& tokenizer) {
  if (args.data.empty()) {  // the filler of RULER's simplest needle task (arXiv:2404.06654)
    return tokenizer.encode(
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n");
  }
  std::vector<int32_t> ids;
  for_each_document(args.data, tokenizer, [&](std::span<const int32_t> document) {
    for (const int32_t id : document) {
      if (!tokenizer.is_special(id)) ids.push_back(id);
    }
    return static_cast<int64_t>(ids.size()) < 2 * args.context;
  });
  return ids;
}

json eval_niah(const EvalArgs& args, const LoadedModel& model) {
  constexpr double kDepths[] = {0.0, 0.25, 0.5, 0.75, 1.0};
  const int64_t samples = args.samples > 0 ? args.samples : 10;
  const std::vector<int32_t> text = haystack(args, model.tokenizer);
  std::vector<int64_t> lengths;
  for (int64_t length = 1024; length < args.context; length *= 2) lengths.push_back(length);
  lengths.push_back(args.context);
  json points = json::array();
  ProgressBar progress({.label = "niah", .total = static_cast<int64_t>(lengths.size() * std::size(kDepths))});
  for (const int64_t length : lengths) {
    for (const double depth : kDepths) {
      progress.update(static_cast<int64_t>(points.size()),
                      fmt::format("{} tokens, depth {:.0f} %", length, 100 * depth));
      const NeedleScore score = needle(model, text,
                                       {.length = length,
                                        .depth = depth,
                                        .distractors = args.distractors,
                                        .samples = samples,
                                        .seed = args.seed});
      points.push_back({{"length", length},
                        {"depth", depth},
                        {"accuracy", score.numbers.accuracy()},
                        {"token_accuracy", score.tokens.accuracy()}});
    }
  }
  return {{"task", "niah"},     {"haystack", args.data.empty() ? "filler" : args.data},
          {"samples", samples}, {"distractors", args.distractors},
          {"seed", args.seed},  {"points", points}};
}

void print_niah(const json& r) {
  print_out("numbers found / tokens of them right, by length and depth ({} samples a cell, {} distractors)\n",
            r["samples"].get<int64_t>(), r["distractors"].get<int64_t>());
  const auto first = r["points"][0]["length"].get<int64_t>();
  int64_t row = -1;
  std::string header = fmt::format("\n{:>9}", "tokens"), lines;
  for (const json& p : r["points"]) {
    const auto length = p["length"].get<int64_t>();
    if (length == first) header += fmt::format("  {:>10.0f} %", 100 * p["depth"].get<double>());
    if (length != row) lines += fmt::format("\n{:>9}", length);
    row = length;
    lines += fmt::format("  {:>4.0f} /{:>4.0f} %", 100 * p["accuracy"].get<double>(),
                         100 * p["token_accuracy"].get<double>());
  }
  print_out("{}{}\n", header, lines);
}

}  // namespace

int run_eval(const EvalArgs& args) {
  const LoadedModel model =
      load({.model = args.model, .dtype = args.dtype, .weights = args.weights, .device = args.device});
  json result;
  void (*print)(const json&) = nullptr;
  if (args.task == "ppl") {
    result = eval_ppl(args, model);
    print = print_ppl;
  } else if (args.task == "mqar") {
    result = eval_mqar(args, model);
    print = print_mqar;
  } else if (args.task == "vision") {
    result = eval_vision(args, model);
    print = print_vision;
  } else if (args.task == "tools") {
    result = eval_tools(args, model);
    print = print_tools;
  } else {
    result = eval_niah(args, model);
    print = print_niah;
  }
  result["model"] = args.model;
  if (args.json)
    print_json(result);
  else
    print(result);
  return 0;
}

}  // namespace godwit::cli
