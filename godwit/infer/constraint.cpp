#include "godwit/infer/constraint.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace godwit {

void GrammarConstraint::forbid(at::Tensor& forbidden) {
  const std::vector<uint64_t>& allowed = filter_.allowed();
  bool* out = forbidden.data_ptr<bool>();
  const int64_t size = forbidden.numel();
  for (int64_t word = 0; word * 64 < size; ++word) {
    const uint64_t bits = word < static_cast<int64_t>(allowed.size()) ? allowed[word] : 0;
    if (bits == ~uint64_t{0}) continue;
    for (int64_t i = word * 64; i < std::min(size, word * 64 + 64); ++i)
      out[i] |= (bits >> (i % 64) & 1) == 0;
  }
  if (hurried_ && filter_.hurried()) *hurried_ = true;
}

}  // namespace godwit
