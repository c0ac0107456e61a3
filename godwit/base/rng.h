// Counter-based randomness: a value is a pure function of (seed, stream, counter), so nothing has to be saved
// to resume. SplitMix64 finaliser (Steele, Lea, Flood, OOPSLA 2014).
#pragma once

#include <cstdint>

namespace godwit {

inline uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// 64 random bits for `counter` in the stream `stream` of `seed`.
inline uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t counter) {
  return mix64(mix64(mix64(seed) ^ stream) ^ counter);
}

// Uniform in [0, 1), 53 bits.
inline double random_uniform(uint64_t seed, uint64_t stream, uint64_t counter) {
  return static_cast<double>(random_bits(seed, stream, counter) >> 11) * 0x1.0p-53;
}

}  // namespace godwit
