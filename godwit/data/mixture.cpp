#include "godwit/data/mixture.h"

#include <algorithm>
#include <cmath>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"

namespace godwit::data {

Mixture::Mixture(std::span<const double> weights, uint64_t key) {
  check(!weights.empty(), "a data mix without data");
  double rest = 0;
  for (const double weight : weights) {
    check(weight > 0 && std::isfinite(weight), "a data mix has the weight {}; weights are positive", weight);
    rest += weight;
  }
  for (size_t s = 0; s + 1 < weights.size(); ++s) {
    const double share = std::clamp(weights[s] / rest, 0.0, 1.0);
    splits_.push_back({static_cast<uint64_t>(std::llround(share * 0x1p32)), random_bits(key, 0, s) >> 32});
    rest -= weights[s];
  }
}

uint64_t Mixture::taken(const Split& split, uint64_t n) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(n) * split.share + split.phase) >> 32);
}

Mixture::Choice Mixture::at(uint64_t n) const {
  for (size_t s = 0; s < splits_.size(); ++s) {
    const uint64_t before = taken(splits_[s], n);
    if (taken(splits_[s], n + 1) > before) return {s, before};
    n -= before;
  }
  return {splits_.size(), n};
}

uint64_t Mixture::count(size_t stream, uint64_t n) const {
  for (size_t s = 0; s < stream; ++s) n -= taken(splits_[s], n);
  return stream < splits_.size() ? taken(splits_[stream], n) : n;
}

}  // namespace godwit::data
