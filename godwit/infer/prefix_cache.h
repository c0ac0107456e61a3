// Finished states of prompts, to go on from. A recurrent state cannot be rewound, so an entry is the whole
// state (KDA slot and latent pages) at one boundary: a multiple of the page. Entries stand at the end of a
// prompt, at an interval inside it, and where a prompt parts from one seen before. Prompts are compared by
// their keys: the id of a token, or what stands for a picture (prompt_media.h).
//
// Two tiers, each with a budget, each giving up what was not used for the longest time: states whose pages
// lie in the store, and behind them states copied to host memory, which come back into the store when a
// prompt asks for them. Both keep all bits.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "godwit/model/state.h"

namespace godwit {

class PrefixCache {
 public:
  struct Options {
    int64_t max_bytes = int64_t{256} << 20;   // of KDA snapshots; pages belong to the store
    int64_t host_bytes = int64_t{256} << 20;  // of states in host memory, latents too
    int64_t interval = 4096;                  // tokens between states inside a long prompt
    int64_t granule = kLatentPage;            // boundaries are multiples of it; whole pages
  };
  // `state` is the store that the snapshots are of; it must outlive the cache.
  PrefixCache(const Options& options, const ModelState& state) : options_(options), state_(state) {}

  // The state after a prefix: in the store, or else in host memory.
  struct Hit {
    int64_t length = 0;
    std::optional<StateSnapshot> stored;
    SwappedState host;
  };
  // The longest state of a proper prefix of `prompt` (at least one token is left to feed), or none. A hit
  // holds its memory; pages of the store are free again only when it is gone.
  std::optional<Hit> find(std::span<const int64_t> prompt);

  // Boundaries in (start, size of prompt] at which the prefill of `prompt` should be stored, ascending.
  // Remembers the prompt, so that a later one that parts from it gets a boundary there.
  std::vector<int64_t> boundaries(std::span<const int64_t> prompt, int64_t start);

  // Tokens that a prompt given to `boundaries` began with, in whole pages.
  int64_t known_tokens(std::span<const int64_t> prompt) const;

  // The state after `prefix`, whose length is a multiple of the page. Older entries make room. One that lies
  // in host memory moves into the store.
  void insert(std::span<const int64_t> prefix, StateSnapshot state);

  // Moves the entry in the store that was not used for the longest time to host memory, or drops it where it
  // does not fit the budget; false if there is none in the store.
  bool evict();

  // As new: neither tier holds anything.
  void clear() {
    stored_.clear();
    host_.clear();
    by_hash_.clear();
    seen_.clear();
    bytes_ = host_bytes_ = 0;
  }

  int64_t entries() const { return static_cast<int64_t>(by_hash_.size()); }
  int64_t host_entries() const { return static_cast<int64_t>(host_.size()); }
  int64_t bytes() const { return bytes_; }
  int64_t host_bytes() const { return host_bytes_; }

 private:
  struct Entry {
    uint64_t hash;
    std::vector<int64_t> keys;
    std::optional<StateSnapshot> stored;  // else in `host`
    SwappedState host;
  };
  using Entries = std::list<Entry>;

  int64_t known_pages(const std::vector<uint64_t>& hashes) const;
  void to_host(Entry entry);
  void drop(Entries& entries, Entries::iterator entry);

  Options options_;
  const ModelState& state_;
  Entries stored_, host_;  // the newest use first
  std::unordered_map<uint64_t, Entries::iterator> by_hash_;
  std::unordered_set<uint64_t> seen_;  // prefixes, in whole pages, of prompts that came
  int64_t bytes_ = 0, host_bytes_ = 0;
};

}  // namespace godwit
