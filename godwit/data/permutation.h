// A seeded permutation of 0 .. n-1 that needs no memory: a balanced Feistel network over the next power of
// four, walked until it falls inside (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
// Fewer than four steps on average.
#pragma once

#include <bit>
#include <cstdint>

#include "godwit/base/rng.h"

namespace godwit::data {

class Permutation {
 public:
  Permutation(uint64_t n, uint64_t key)
      : n_(n), key_(key), half_(n > 1 ? (std::bit_width(n - 1) + 1) / 2 : 1) {}

  uint64_t operator()(uint64_t i) const {
    do {
      i = rounds(i);
    } while (i >= n_);
    return i;
  }

 private:
  uint64_t rounds(uint64_t i) const {
    const uint64_t mask = (uint64_t{1} << half_) - 1;
    uint64_t left = i >> half_, right = i & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t next = left ^ (random_bits(key_, round, right) & mask);
      left = right;
      right = next;
    }
    return left << half_ | right;
  }

  uint64_t n_, key_;
  int half_;  // bits of each half
};

}  // namespace godwit::data
