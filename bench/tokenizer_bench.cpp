// Times the tokenizer on one core; bench/tokenizer_bench.py runs it beside tiktoken.
//
//   tokenizer_bench train TEXT RANKS OUT        trains a vocabulary and saves it in the directory OUT
//   tokenizer_bench encode MODEL TEXT [IDS]     one JSON line: bytes, ids, seconds of processor time; ids as
//   int32 to IDS
#include <ctime>
#include <string>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/text/tokenizer.h"
#include "godwit/text/train_bpe.h"

namespace godwit {
namespace {

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void train(const std::string& text_path, int64_t ranks, const std::string& out) {
  const std::string text = read_file(text_path);
  const double start = thread_seconds();
  BpeTrainer trainer;
  trainer.add_text(text);
  const double counted = thread_seconds();
  const auto tokens = trainer.train({.ranks = ranks});
  fmt::print("{{\"bytes\": {}, \"ranks\": {}, \"count_seconds\": {:.3f}, \"merge_seconds\": {:.3f}}}\n",
             text.size(), ranks, counted - start, thread_seconds() - counted);
  Tokenizer::from_ranks(tokens).save(out);
}

void encode(const std::string& model, const std::string& text_path, const std::string& ids_path) {
  const Tokenizer tokenizer = Tokenizer::load(model);
  const std::string text = read_file(text_path);
  const double start = thread_seconds();
  const std::vector<int32_t> ids = tokenizer.encode(text);
  const double encoded = thread_seconds();
  const std::string back = tokenizer.decode(ids);
  const double decoded = thread_seconds();
  check(back == text, "decode(encode(text)) differs from the text");
  if (!ids_path.empty()) {
    write_file(ids_path, {reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(int32_t)});
  }
  fmt::print("{{\"bytes\": {}, \"ids\": {}, \"encode_seconds\": {:.6f}, \"decode_seconds\": {:.6f}}}\n",
             text.size(), ids.size(), encoded - start, decoded - encoded);
}

}  // namespace
}  // namespace godwit

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  try {
    if (args.size() == 4 && args[0] == "train") {
      godwit::train(args[1], std::stoll(args[2]), args[3]);
    } else if ((args.size() == 3 || args.size() == 4) && args[0] == "encode") {
      godwit::encode(args[1], args[2], args.size() == 4 ? args[3] : "");
    } else {
      fmt::print(stderr, "usage: tokenizer_bench train TEXT RANKS OUT | encode MODEL TEXT [IDS]\n");
      return 2;
    }
  } catch (const godwit::Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
