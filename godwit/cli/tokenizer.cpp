// `godwit tokenizer train|encode|decode`.
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/progress.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/data/documents.h"
#include "godwit/data/tokenizer.h"
#include "godwit/text/tokenizer.h"
#include "godwit/text/train_bpe.h"

namespace godwit::cli {

int run_tokenizer_train(const TokenizerTrainArgs& args) {
  // Data that is packed with a tokenizer is worth nothing without it.
  check(!std::filesystem::exists(std::filesystem::path(args.out) / "tiktoken.model"),
        "{} holds a tokenizer already: give another --out, or remove it", args.out);
  BpeTrainer trainer;
  uint64_t bytes = 0;
  for (const std::string& input : args.inputs) {
    data::read_documents(input, [&](const data::Document& document, uint64_t) {
      const std::string text = data::plain_text(document);
      trainer.add_text(text);
      bytes += text.size();
    });
  }
  ProgressBar progress({.label = "merging", .total = args.vocab_size});
  std::vector<std::string> tokens = trainer.train(
      {.ranks = args.vocab_size, .progress = [&](int64_t ranks) { progress.update(ranks, ""); }});
  progress.finish();
  const Tokenizer tokenizer = Tokenizer::from_ranks(std::move(tokens));
  tokenizer.save(args.out);
  print_out("{}: {} ranks and {} special tokens from {} of text\n", args.out, tokenizer.ranks(),
            kSpecialTokens, human_bytes(static_cast<double>(bytes)));
  return 0;
}

int run_tokenizer_encode(const TokenizerUseArgs& args) {
  const Tokenizer tokenizer = Tokenizer::load(args.tokenizer);
  const std::string text = args.input ? *args.input : read_stdin();
  print_json(args.specials ? tokenizer.encode_with_specials(text) : tokenizer.encode(text));
  return 0;
}

// The exact bytes, and a line break only where a person looks on.
int run_tokenizer_decode(const TokenizerUseArgs& args) {
  const Tokenizer tokenizer = Tokenizer::load(args.tokenizer);
  const std::string list = args.input ? *args.input : read_stdin();
  write_out(tokenizer.decode(parse_ids(list, tokenizer.vocab_size(), args.input ? "ids" : "stdin")));
  if (::isatty(STDOUT_FILENO) == 1) write_out("\n");
  return 0;
}

}  // namespace godwit::cli
