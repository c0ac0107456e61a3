#include "godwit/text/train_bpe.h"

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/text/pretokenize.h"

namespace godwit {
namespace {

constexpr int64_t kBytes = 256;
constexpr int64_t kProgressEvery = 100;

// Names a byte string: a token, or what two neighbours make together. Symbols 0..255 are the single bytes.
using Symbol = uint32_t;

struct ByteString {
  std::string bytes;
  uint32_t rank = UINT32_MAX;   // UINT32_MAX: a candidate, not a token yet
  int64_t count = 0;            // how often two neighbours make it now
  std::vector<uint32_t> words;  // where it has been made; may be out of date and hold repeats
};

// A piece of text, as often as it occurs. joints[i] is what symbols[i] and symbols[i+1] make together.
struct Word {
  std::vector<Symbol> symbols;
  std::vector<Symbol> joints;
  int64_t count = 0;
};

struct PairHash {
  size_t operator()(uint64_t pair) const { return mix64(pair); }
};

class Merger {
 public:
  Merger();
  void add_word(std::string_view piece, int64_t count);
  void start();  // after the last word
  // Makes the most frequent candidate a token, in every word. False when none occurs `min_count` times.
  bool step(int64_t min_count);
  std::vector<std::string> tokens() const;
  size_t size() const { return tokens_.size(); }

 private:
  struct Candidate {
    int64_t count;
    Symbol symbol;
  };
  struct Lower {  // heap order: rarer, then higher bytes
    const Merger& merger;
    bool operator()(const Candidate& a, const Candidate& b) const {
      if (a.count != b.count) return a.count < b.count;
      return merger.strings_[a.symbol].bytes > merger.strings_[b.symbol].bytes;
    }
  };
  bool is_token(Symbol symbol) const { return strings_[symbol].rank != UINT32_MAX; }
  Symbol intern(std::string bytes);
  Symbol joined(Symbol left, Symbol right);
  void count_joints(uint32_t index, int sign);
  void push(Symbol symbol);
  void merge(Word& word, Symbol token);

  std::vector<Word> words_;
  std::vector<ByteString> strings_;
  std::vector<Symbol> tokens_;  // by rank
  std::unordered_map<std::string, Symbol> by_bytes_;
  std::unordered_map<uint64_t, Symbol, PairHash> by_pair_;
  std::vector<Candidate> heap_;  // every candidate is in it at least once with its count or a higher, old one
  std::vector<Symbol> grown_;    // candidates whose count grew in this step
};

Merger::Merger() {
  for (int64_t byte = 0; byte < kBytes; ++byte) {
    const Symbol symbol = intern(std::string(1, static_cast<char>(byte)));
    strings_[symbol].rank = symbol;
    tokens_.push_back(symbol);
  }
}

Symbol Merger::intern(std::string bytes) {
  const auto [at, is_new] = by_bytes_.try_emplace(bytes, static_cast<Symbol>(strings_.size()));
  if (is_new) strings_.push_back({.bytes = std::move(bytes), .words = {}});
  return at->second;
}

Symbol Merger::joined(Symbol left, Symbol right) {
  const auto [at, is_new] = by_pair_.try_emplace(uint64_t{left} << 32 | right, 0);
  if (is_new) at->second = intern(strings_[left].bytes + strings_[right].bytes);
  return at->second;
}

void Merger::add_word(std::string_view piece, int64_t count) {
  Word word{.symbols = {}, .joints = {}, .count = count};
  for (const char c : piece) word.symbols.push_back(static_cast<uint8_t>(c));
  for (size_t i = 0; i + 1 < word.symbols.size(); ++i) {
    word.joints.push_back(joined(word.symbols[i], word.symbols[i + 1]));
  }
  words_.push_back(std::move(word));
  count_joints(static_cast<uint32_t>(words_.size() - 1), /*sign=*/1);
}

void Merger::start() {
  for (Symbol symbol = kBytes; symbol < strings_.size(); ++symbol) push(symbol);
  grown_.clear();
}

void Merger::count_joints(uint32_t index, int sign) {
  for (const Symbol symbol : words_[index].joints) {
    ByteString& string = strings_[symbol];
    string.count += sign * words_[index].count;
    if (sign < 0) continue;
    if (string.words.empty() || string.words.back() != index) string.words.push_back(index);
    grown_.push_back(symbol);
  }
}

void Merger::push(Symbol symbol) {
  heap_.push_back({strings_[symbol].count, symbol});
  std::push_heap(heap_.begin(), heap_.end(), Lower{*this});
}

bool Merger::step(int64_t min_count) {
  while (!heap_.empty()) {
    const Candidate best = heap_.front();
    std::pop_heap(heap_.begin(), heap_.end(), Lower{*this});
    heap_.pop_back();
    const int64_t count = strings_[best.symbol].count;
    if (is_token(best.symbol) || best.count < min_count) continue;
    if (best.count != count) {
      if (count < best.count) push(best.symbol);
      continue;
    }
    strings_[best.symbol].rank = static_cast<uint32_t>(tokens_.size());
    tokens_.push_back(best.symbol);
    for (const uint32_t index : std::exchange(strings_[best.symbol].words, {})) {
      Word& word = words_[index];
      if (std::find(word.joints.begin(), word.joints.end(), best.symbol) == word.joints.end()) continue;
      count_joints(index, /*sign=*/-1);
      merge(word, best.symbol);
      count_joints(index, /*sign=*/1);
    }
    std::sort(grown_.begin(), grown_.end());
    grown_.erase(std::unique(grown_.begin(), grown_.end()), grown_.end());
    for (const Symbol symbol : grown_) {
      if (strings_[symbol].count >= min_count) push(symbol);
    }
    grown_.clear();
    return true;
  }
  return false;
}

// Merges the newest token from left to right. That is all the encoder would do: a stretch of whole symbols
// whose bytes are an older token was merged into it before, as merging inside a stretch does not depend on
// what is around it, so the new symbol never makes an older token with its neighbours.
void Merger::merge(Word& word, Symbol token) {
  const size_t n = word.symbols.size();
  std::vector<Symbol> symbols, joints;
  symbols.reserve(n);
  joints.reserve(n);
  bool was_merged = false;
  for (size_t i = 0; i < n;) {
    const bool merges = i + 1 < n && word.joints[i] == token;
    const Symbol symbol = merges ? token : word.symbols[i];
    if (!symbols.empty()) {
      joints.push_back(merges || was_merged ? joined(symbols.back(), symbol) : word.joints[i - 1]);
    }
    symbols.push_back(symbol);
    was_merged = merges;
    i += merges ? 2 : 1;
  }
  word.symbols = std::move(symbols);
  word.joints = std::move(joints);
}

std::vector<std::string> Merger::tokens() const {
  std::vector<std::string> out;
  for (const Symbol symbol : tokens_) out.push_back(strings_[symbol].bytes);
  return out;
}

}  // namespace

void BpeTrainer::add_text(std::string_view text) {
  for (Pretokenizer pieces(text); !pieces.done();) {
    const std::string_view piece = pieces.next();
    const auto at = counts_.find(piece);
    if (at != counts_.end()) {
      ++at->second;
    } else {
      counts_.emplace(piece, 1);
    }
  }
}

std::vector<std::string> BpeTrainer::train(const TrainBpeOptions& options) const {
  check(options.ranks >= kBytes,
        "tokenizer training: {} ranks asked, at least {} (the single bytes) are needed", options.ranks,
        kBytes);
  Merger merger;
  for (const auto& [piece, count] : counts_) merger.add_word(piece, count);
  merger.start();
  while (static_cast<int64_t>(merger.size()) < options.ranks) {
    check(merger.step(options.min_count),
          "tokenizer training: the text yields only {} of {} ranks (a merge must occur {} times): give more "
          "text or ask for fewer",
          merger.size(), options.ranks, options.min_count);
    const auto done = static_cast<int64_t>(merger.size());
    if (options.progress && done % kProgressEvery == 0) options.progress(done);
  }
  return merger.tokens();
}

}  // namespace godwit
