// Finished states of prompts, to go on from. A recurrent state cannot be rewound, so an entry is the whole
// state (KDA slot and latent pages) at one boundary: a multiple of the page. Entries stand at the end of a
// prompt, at an interval inside it, and where a prompt parts from one seen before. Prompts are compared by
// their keys: the id of a token, or what stands for a picture (prompt_media.h).
#pragma once

#include <cstdint>
#include <list>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "godwit/model/state.h"

namespace godwit {

class PrefixCache {
 public:
  struct Options {
    int64_t max_bytes = int64_t{256} << 20;  // of KDA snapshots; pages belong to the store
    int64_t interval = 4096;                 // tokens between states inside a long prompt
  };
  explicit PrefixCache(const Options& options) : options_(options) {}

  // The longest state of a proper prefix of `prompt` (at least one token is left to feed), or null. It stays
  // valid until the next call that is not const.
  const StateSnapshot* find(std::span<const int64_t> prompt);

  // Boundaries in (start, size of prompt] at which the prefill of `prompt` should be stored, ascending.
  // Remembers the prompt, so that a later one that parts from it gets a boundary there.
  std::vector<int64_t> boundaries(std::span<const int64_t> prompt, int64_t start);

  // The state after `prefix`, whose length is a multiple of the page. Older entries make room.
  void insert(std::span<const int64_t> prefix, StateSnapshot state);

  // Drops the entry that was not used for the longest time; false if there is none.
  bool evict();

  int64_t entries() const { return static_cast<int64_t>(by_hash_.size()); }
  int64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    uint64_t hash;
    std::vector<int64_t> keys;
    StateSnapshot state;
  };

  Options options_;
  std::list<Entry> entries_;  // the newest use first
  std::unordered_map<uint64_t, std::list<Entry>::iterator> by_hash_;
  std::unordered_set<uint64_t> seen_;  // prefixes, in whole pages, of prompts that came
  int64_t bytes_ = 0;
};

}  // namespace godwit
