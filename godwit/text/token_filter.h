// Which tokens may come next so that the text stays within a grammar: the grammar followed byte by byte,
// through a trie of the vocabulary. Sets of places in the grammar become states of a deterministic automaton
// as they are met, so that a mask is a walk through the trie by table; masks of states are kept.
//
// A budget of tokens is kept in mind: near its end only what can still be completed is allowed, so that a
// text that fits at all ends complete. (Every byte is a token: what needs n bytes takes at most n tokens.)
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "godwit/text/grammar.h"
#include "godwit/text/tokenizer.h"

namespace godwit {

// The tokens of a vocabulary that are no specials, in one array in the order of their bytes. Does not change
// once it is made; one is enough for all filters.
class TokenTrie {
 public:
  explicit TokenTrie(const Tokenizer& tokenizer);

  struct Node {
    int32_t end;     // the first node that is not below this one
    int32_t token;   // that ends here, or -1
    uint16_t depth;  // bytes so far, from 1
    uint8_t byte;
  };
  const std::vector<Node>& nodes() const { return nodes_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  size_t longest() const { return longest_; }

 private:
  const Tokenizer* tokenizer_;
  std::vector<Node> nodes_;
  size_t longest_ = 0;
};

class TokenFilter {
 public:
  // `budget`: tokens that may be drawn; what costs nothing in the grammar may come behind them.
  TokenFilter(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const TokenTrie> trie, int64_t budget);

  // A bit for each id of the tokenizer. Throws Error when the grammar is too ambiguous to follow.
  const std::vector<uint64_t>& allowed();
  bool allows(int32_t id);
  // Throws Error for a token that is not allowed.
  void accept(int32_t id);

  bool complete() const { return states_[now_].final; }  // the text may end here
  // The budget has ruled out what the grammar would have allowed.
  bool hurried() const { return hurried_; }

 private:
  struct Place {  // a node, and the frame to return to
    int32_t node, frame;
    auto operator<=>(const Place&) const = default;
  };
  struct Frame {
    int32_t then, parent;
    int64_t least;  // cost from `then` to the end of everything
  };
  struct State {
    std::vector<Place> places;
    int64_t least = Grammar::kNever;  // cost to the end
    bool final = false;
  };
  struct Mask {
    std::vector<uint64_t> bits;
    int64_t least = 0;  // the largest State::least behind a token of the mask
  };

  int32_t frame(int32_t then, int32_t parent);
  int32_t intern(std::vector<Place> places);
  int32_t next(int32_t state, int32_t symbol);
  int32_t step(int32_t state, int32_t symbol);
  Mask walk(int64_t most);
  void forget();

  std::shared_ptr<const Grammar> grammar_;
  std::shared_ptr<const TokenTrie> trie_;
  int64_t left_;  // of the budget
  bool hurried_ = false;
  std::vector<Frame> frames_;
  std::unordered_map<uint64_t, int32_t> frame_ids_;
  std::vector<State> states_;
  std::vector<int32_t> table_;  // [state, class]: kDead, kUnknown or a state
  std::unordered_map<std::string, int32_t> state_ids_;
  std::unordered_map<int32_t, Mask> masks_;
  std::vector<uint64_t> narrowed_;  // what allowed() gave, where it is not a kept mask
  int32_t now_ = 0;
  int64_t work_ = 0;  // places looked at for the mask that is being made
};

}  // namespace godwit
