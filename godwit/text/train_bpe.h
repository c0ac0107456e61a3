// Trains byte-pair ranks that mean the same to the encoder as to the trainer.
//
// Text is split by the K3 pattern; equal pieces are counted once with their number. From single bytes (ranks
// 0..255, byte b has rank b), the concatenation of two neighbours that occurs most often becomes the next
// token, until there are enough. Candidates are counted by their bytes, not by the pair they came from: the
// encoder merges any two neighbours whose bytes together are a token. Of equally frequent candidates the one
// with the lower bytes is taken, so the result is a function of the text alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace godwit {

struct TrainBpeOptions {
  int64_t ranks = 0;      // tokens wanted, the 256 bytes included; special tokens come on top of these
  int64_t min_count = 2;  // a merge must occur at least this often
  std::function<void(int64_t ranks_done)> progress = {};  // called every hundred ranks, may be empty
};

class BpeTrainer {
 public:
  // Counts the pieces of one document. Invalid UTF-8 is kept as it is.
  void add_text(std::string_view text);

  // Tokens in rank order. Throws Error when the text has too few merges for options.ranks.
  std::vector<std::string> train(const TrainBpeOptions& options) const;

 private:
  struct StringHash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  std::unordered_map<std::string, int64_t, StringHash, std::equal_to<>> counts_;
};

}  // namespace godwit
