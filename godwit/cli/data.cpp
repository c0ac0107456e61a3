// `godwit data pack`: text to token shards; `godwit data demos`: conversations of scripted experts.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/progress.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/data/documents.h"
#include "godwit/data/pack.h"
#include "godwit/data/tokenizer.h"
#include "godwit/rl/demonstrate.h"

namespace godwit::cli {
namespace {

// Without a vocabulary every byte is a token.
Tokenizer byte_tokenizer() {
  std::vector<std::string> ranks;
  for (int byte = 0; byte < 256; ++byte) ranks.emplace_back(1, static_cast<char>(byte));
  return Tokenizer::from_ranks(std::move(ranks));
}

int64_t kib(uint64_t bytes) {
  return static_cast<int64_t>(bytes / 1024);
}

uint64_t size_of(const std::vector<std::filesystem::path>& inputs) {
  uint64_t bytes = 0;
  for (const auto& file : data::list_inputs(inputs)) {
    if (std::filesystem::is_regular_file(file)) bytes += std::filesystem::file_size(file);
  }
  return bytes;
}

void print_split(const char* name, const data::SplitSummary& split) {
  if (split.media > 0) print_out("{:<9}{:>9} pictures\n", name, split.media);
  const double bytes_per_token =
      split.tokens > 0 ? static_cast<double>(split.text_bytes) / static_cast<double>(split.tokens) : 0.0;
  print_out("{:<9}{:>9} documents {:>14} tokens {:>12} of text, {:.2f} bytes a token\n", name,
            split.documents, split.tokens, human_bytes(static_cast<double>(split.text_bytes)),
            bytes_per_token);
}

}  // namespace

int run_data_pack(const DataPackArgs& args) {
  const Tokenizer tokenizer = args.tokenizer.empty() ? byte_tokenizer() : Tokenizer::load(args.tokenizer);
  // Without a preprocessor_config.json beside the tokenizer, pictures are cut as the released model does.
  const io::ImageProcessorConfig processor =
      args.tokenizer.empty() ? io::ImageProcessorConfig{} : io::load_image_processor(args.tokenizer);
  const std::vector<std::filesystem::path> inputs(args.inputs.begin(), args.inputs.end());
  ProgressBar bar({.label = "packing", .total = kib(size_of(inputs))});
  const data::PackSummary summary =
      data::pack_corpus({.inputs = inputs,
                         .out = args.out,
                         .replace = args.replace,
                         .holdout = args.holdout,
                         .tokenizer = data::pack_tokenizer(tokenizer, processor),
                         .processor = processor,
                         .progress = [&](uint64_t done, uint64_t) { bar.update(kib(done), "KiB"); }});
  bar.finish();
  print_split("train", summary.train);
  if (args.holdout > 0) print_split("held out", summary.heldout);
  if (summary.empty_documents > 0) print_out("{} empty documents passed over\n", summary.empty_documents);
  return 0;
}

int run_data_demos(const DataDemosArgs& args) {
  const auto options = nlohmann::json::parse(args.options_json, nullptr, /*allow_exceptions=*/false);
  check(options.is_object(), "--options: expected a JSON object");
  const auto environment = rl::make_environment(args.environment, options);
  io::AtomicFile file(args.out);
  ProgressBar bar({.label = "episodes", .total = args.count});
  double success = 0;
  int64_t calls = 0, faults = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    const rl::Demonstration episode = rl::demonstrate(*environment, args.seed + static_cast<uint64_t>(i));
    file.append(rl::to_json(episode).dump() + "\n");
    success += episode.success;
    calls += episode.calls;
    faults += episode.faults;
    bar.update(i + 1, "");
  }
  file.commit();
  bar.finish();
  const auto count = static_cast<double>(args.count);
  print_out("{}: {} episodes of {}, {:.1f} % solved, {:.2f} tool calls an episode, {:.2f} of them failed\n",
            args.out, args.count, args.environment, 100 * success / count, static_cast<double>(calls) / count,
            static_cast<double>(faults) / count);
  return 0;
}

}  // namespace godwit::cli
