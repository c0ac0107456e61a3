// `godwit data pack`: text to token shards.
#include <filesystem>

#include "godwit/base/progress.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/data/documents.h"
#include "godwit/data/pack.h"
#include "godwit/data/tokenizer.h"

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
  const double bytes_per_token =
      split.tokens > 0 ? static_cast<double>(split.text_bytes) / static_cast<double>(split.tokens) : 0.0;
  print_out("{:<9}{:>9} documents {:>14} tokens {:>12} of text, {:.2f} bytes a token\n", name,
            split.documents, split.tokens, human_bytes(static_cast<double>(split.text_bytes)),
            bytes_per_token);
}

}  // namespace

int run_data_pack(const DataPackArgs& args) {
  const Tokenizer tokenizer = args.tokenizer.empty() ? byte_tokenizer() : Tokenizer::load(args.tokenizer);
  const std::vector<std::filesystem::path> inputs(args.inputs.begin(), args.inputs.end());
  ProgressBar bar({.label = "packing", .total = kib(size_of(inputs))});
  const data::PackSummary summary =
      data::pack_corpus({.inputs = inputs,
                         .out = args.out,
                         .replace = args.replace,
                         .holdout = args.holdout,
                         .tokenizer = data::pack_tokenizer(tokenizer),
                         .progress = [&](uint64_t done, uint64_t) { bar.update(kib(done), "KiB"); }});
  bar.finish();
  print_split("train", summary.train);
  if (args.holdout > 0) print_split("held out", summary.heldout);
  if (summary.empty_documents > 0) print_out("{} empty documents passed over\n", summary.empty_documents);
  return 0;
}

}  // namespace godwit::cli
