// Which of several streams the n-th sequence comes from, and which one of that stream it is. Both are closed
// forms of n: no history, nothing to save. Every prefix has each stream's share to within one sequence per
// split: stream 0 against the rest takes the n where floor(n p + phase) steps, the rest is split the same
// way.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace godwit::data {

class Mixture {
 public:
  // Weights are positive; they need not add up to one.
  Mixture(std::span<const double> weights, uint64_t key);

  struct Choice {
    size_t stream;
    uint64_t index;  // how many of 0 .. n-1 came from the same stream
  };
  Choice at(uint64_t n) const;
  // How many of 0 .. n-1 come from `stream`.
  uint64_t count(size_t stream, uint64_t n) const;

 private:
  struct Split {
    uint64_t share;  // of what reached this split, in units of 2^-32
    uint64_t phase;  // below 2^32
  };
  static uint64_t taken(const Split& split, uint64_t n);

  std::vector<Split> splits_;  // one fewer than streams
};

}  // namespace godwit::data
