// `godwit data pack`: text to token shards.
#include "godwit/base/progress.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
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
  std::optional<ProgressBar> bar;
  data::PackOptions options{
      .inputs = {args.inputs.begin(), args.inputs.end()},
      .out = args.out,
      .replace = args.replace,
      .holdout = args.holdout,
      .tokenizer = data::pack_tokenizer(tokenizer),
      .progress = [&](uint64_t done, uint64_t total) {
        if (!bar) bar.emplace(ProgressOptions{.label = "packing", .total = static_cast<int64_t>(total)});
        bar->update(static_cast<int64_t>(done), human_bytes(static_cast<double>(done)));
      }};
  const data::PackSummary summary = data::pack_corpus(options);
  if (bar) bar->finish();
  print_split("train", summary.train);
  if (args.holdout > 0) print_split("held out", summary.heldout);
  if (summary.empty_documents > 0) print_out("{} empty documents passed over\n", summary.empty_documents);
  return 0;
}

}  // namespace godwit::cli
