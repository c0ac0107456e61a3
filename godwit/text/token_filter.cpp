#include "godwit/text/token_filter.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "godwit/base/check.h"

namespace godwit {
namespace {

constexpr int32_t kDead = -1, kUnknown = -2;
constexpr int32_t kNoFrame = -1;
// A filter keeps a few MB at most; what is met again is made again.
constexpr size_t kMostStates = 4096, kMostMasks = 64;
// Places looked at for one mask: about a second.
constexpr int64_t kMostWork = 20'000'000;

uint64_t pair_key(int32_t a, int32_t b) {
  return (uint64_t{static_cast<uint32_t>(a)} << 32) | static_cast<uint32_t>(b);
}

}  // namespace

TokenTrie::TokenTrie(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {
  std::vector<int32_t> order(tokenizer.ranks());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return tokenizer.token_bytes(a) < tokenizer.token_bytes(b); });
  std::vector<int32_t> path;  // nodes from the root to the last one made
  std::string_view before;
  const auto leave = [&](size_t depth) {
    while (path.size() > depth) {
      nodes_[path.back()].end = static_cast<int32_t>(nodes_.size());
      path.pop_back();
    }
  };
  for (const int32_t id : order) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    check(bytes.size() < 65536, "token {} has {} bytes", id, bytes.size());
    size_t common = 0;
    while (common < std::min(before.size(), bytes.size()) && before[common] == bytes[common]) ++common;
    leave(common);
    for (size_t i = common; i < bytes.size(); ++i) {
      path.push_back(static_cast<int32_t>(nodes_.size()));
      nodes_.push_back({.end = 0,
                        .token = -1,
                        .depth = static_cast<uint16_t>(i + 1),
                        .byte = static_cast<uint8_t>(bytes[i])});
    }
    if (!path.empty()) nodes_[path.back()].token = id;
    longest_ = std::max(longest_, bytes.size());
    before = bytes;
  }
  leave(0);
}

TokenFilter::TokenFilter(std::shared_ptr<const Grammar> grammar, std::shared_ptr<const TokenTrie> trie,
                         int64_t budget)
    : grammar_(std::move(grammar)), trie_(std::move(trie)), left_(budget) {
  now_ = intern({{grammar_->start(grammar_->root()), kNoFrame}});
}

int32_t TokenFilter::frame(int32_t then, int32_t parent) {
  const auto [it, added] =
      frame_ids_.try_emplace(pair_key(then, parent), static_cast<int32_t>(frames_.size()));
  if (added) {
    const int64_t least = grammar_->node(then).least + (parent == kNoFrame ? 0 : frames_[parent].least);
    frames_.push_back({then, parent, std::min(least, Grammar::kNever)});
  }
  return it->second;
}

// The state of these places and all that are reached from them without reading.
int32_t TokenFilter::intern(std::vector<Place> places) {
  State state;
  std::unordered_set<uint64_t> seen;
  const auto reach = [&](Place p) {
    if (grammar_->node(p.node).least < Grammar::kNever && seen.insert(pair_key(p.node, p.frame)).second)
      places.push_back(p);
  };
  std::vector<Place> begun;
  begun.swap(places);
  for (const Place& p : begun) reach(p);
  while (!places.empty()) {
    const Place p = places.back();
    places.pop_back();
    check(++work_ < kMostWork, "the response format is too ambiguous to be followed");
    const Grammar::Node& node = grammar_->node(p.node);
    if (!node.edges.empty()) state.places.push_back(p);
    for (const int32_t to : node.empty) reach({to, p.frame});
    for (const Grammar::Call& call : node.calls) {
      const Grammar::Node& then = grammar_->node(call.then);
      if (then.least >= Grammar::kNever) continue;
      const bool last = then.accepts && then.edges.empty() && then.empty.empty() && then.calls.empty();
      reach({grammar_->start(call.rule), last ? p.frame : frame(call.then, p.frame)});
    }
    if (!node.accepts) continue;
    if (p.frame == kNoFrame) {
      state.final = true;
    } else {
      reach({frames_[p.frame].then, frames_[p.frame].parent});
    }
  }
  if (state.places.empty() && !state.final) return kDead;
  std::sort(state.places.begin(), state.places.end());
  std::string key(reinterpret_cast<const char*>(state.places.data()), state.places.size() * sizeof(Place));
  key += state.final ? '1' : '0';
  const auto [it, added] = state_ids_.try_emplace(std::move(key), static_cast<int32_t>(states_.size()));
  if (!added) return it->second;
  if (state.final) state.least = 0;
  for (const Place& p : state.places) {
    const int64_t rest = p.frame == kNoFrame ? 0 : frames_[p.frame].least;
    state.least = std::min(state.least, grammar_->node(p.node).least + rest);
  }
  states_.push_back(std::move(state));
  table_.resize(table_.size() + grammar_->classes(), kUnknown);
  return it->second;
}

int32_t TokenFilter::step(int32_t state, int32_t symbol) {
  std::vector<Place> places;
  for (const Place& p : states_[state].places) {
    ++work_;
    for (const Grammar::Edge& e : grammar_->node(p.node).edges) {
      if (e.low <= symbol && symbol <= e.high) places.push_back({e.to, p.frame});
    }
  }
  return intern(std::move(places));
}

int32_t TokenFilter::next(int32_t state, int32_t symbol) {
  const size_t cell = static_cast<size_t>(state) * grammar_->classes() + grammar_->class_of(symbol);
  if (table_[cell] == kUnknown) {
    const int32_t to = step(state, symbol);
    table_[cell] = to;  // not by reference: the table may have grown
  }
  return table_[cell];
}

// The tokens behind which the rest costs at most `most`.
TokenFilter::Mask TokenFilter::walk(int64_t most) {
  const Tokenizer& tokenizer = trie_->tokenizer();
  Mask mask{.bits = std::vector<uint64_t>((tokenizer.vocab_size() + 63) / 64)};
  work_ = 0;
  const auto take = [&](int32_t id, int32_t state) {
    if (states_[state].least > most) return;
    mask.bits[id / 64] |= uint64_t{1} << (id % 64);
    mask.least = std::max(mask.least, states_[state].least);
  };
  std::vector<int32_t> path(trie_->longest() + 1);  // states by depth
  path[0] = now_;
  const auto& nodes = trie_->nodes();
  for (size_t i = 0; i < nodes.size();) {
    const TokenTrie::Node& node = nodes[i];
    const int32_t state = next(path[node.depth - 1], node.byte);
    if (state == kDead) {
      i = node.end;
      continue;
    }
    path[node.depth] = state;
    if (node.token >= 0) take(node.token, state);
    ++i;
  }
  for (int32_t k = 0; k < kSpecialTokens; ++k) {
    const int32_t state = next(now_, kSpecialSymbols + k);
    if (state != kDead) take(tokenizer.ranks() + k, state);
  }
  return mask;
}

// Everything but the present state is dropped.
void TokenFilter::forget() {
  std::vector<Place> places = std::move(states_[now_].places);
  const bool final = states_[now_].final;
  const std::vector<Frame> old = std::exchange(frames_, {});
  std::unordered_map<int32_t, int32_t> moved;
  const auto move = [&](int32_t f) {
    std::vector<int32_t> chain;
    for (; f != kNoFrame && !moved.contains(f); f = old[f].parent) chain.push_back(f);
    int32_t parent = f == kNoFrame ? kNoFrame : moved[f];
    for (; !chain.empty(); chain.pop_back()) {
      parent = frame(old[chain.back()].then, parent);
      moved[chain.back()] = parent;
    }
    return parent;
  };
  frame_ids_.clear();
  states_.clear();
  table_.clear();
  state_ids_.clear();
  masks_.clear();
  for (Place& p : places) p.frame = move(p.frame);
  // The places are closed already, except that a final one is no longer among them: it stays final as it was.
  now_ = intern(std::move(places));
  if (now_ == kDead) {  // nothing may follow: only the end
    states_.push_back({.places = {}, .least = 0, .final = final});
    table_.resize(grammar_->classes(), kUnknown);
    now_ = 0;
  }
  states_[now_].final = final;
  if (final) states_[now_].least = 0;
}

const std::vector<uint64_t>& TokenFilter::allowed() {
  if (states_.size() > kMostStates) forget();
  auto it = masks_.find(now_);
  if (it == masks_.end()) {
    if (masks_.size() >= kMostMasks) masks_.clear();
    it = masks_.emplace(now_, walk(Grammar::kNever)).first;
  }
  const int64_t most = std::max<int64_t>(left_ - 1, 0);
  if (it->second.least <= most) return it->second.bits;
  Mask narrow = walk(most);
  const bool any = std::any_of(narrow.bits.begin(), narrow.bits.end(), [](uint64_t b) { return b != 0; });
  if (!any && !complete()) return it->second.bits;  // it does not fit: it will be cut
  hurried_ = true;
  narrowed_ = std::move(narrow.bits);
  return narrowed_;
}

bool TokenFilter::allows(int32_t id) {
  const Tokenizer& tokenizer = trie_->tokenizer();
  if (id < 0 || id >= tokenizer.vocab_size()) return false;
  const auto& bits = allowed();
  return (bits[id / 64] >> (id % 64) & 1) != 0;
}

void TokenFilter::accept(int32_t id) {
  const Tokenizer& tokenizer = trie_->tokenizer();
  work_ = 0;
  int32_t state = now_;
  if (tokenizer.is_special(id)) {
    state = next(state, kSpecialSymbols + id - tokenizer.ranks());
  } else {
    for (const char c : tokenizer.token_bytes(id)) {
      state = next(state, static_cast<unsigned char>(c));
      if (state == kDead) break;
    }
  }
  check(state != kDead, "token {} does not fit the response format", id);
  now_ = state;
  --left_;
}

}  // namespace godwit
