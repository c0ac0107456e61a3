// The parts of attention that are compiled for each instruction set; dispatch/attention.cpp spreads them over
// the threads.
#pragma once

#include "godwit/kernels/attention.h"

namespace godwit::kernels {

inline constexpr int64_t kAttentionQueries =
    192;  // of a forward task: its rows stay in the second-level cache
inline constexpr int64_t kAttentionBackwardQueries = 96;

// Floats from row to row in a block: an odd number of cache lines, so that a column of rows does not fall
// into a few sets of the first-level cache.
inline int64_t attention_row(int64_t width) {
  return (width + 31) / 32 * 32 + 16;
}
inline int64_t attention_columns(int64_t width) {  // of panels, which both instruction sets divide
  return (width + 31) / 32 * 32;
}

// Queries [begin, end) of sequence n, head h.
struct AttentionQueries {
  int64_t sequence = 0, head = 0;
  int64_t begin = 0, end = 0;
};
inline int64_t attention_forward_scratch(const AttentionInputs& in) {
  return kAttentionQueries *
             (attention_row(in.key) + attention_row(in.value) + attention_row(kAttentionKeys) + 48) +
         kAttentionKeys * (attention_columns(in.key) + attention_columns(in.value));
}

// Keys [begin, end) of sequence n, head h; begin is a multiple of kAttentionKeys.
struct AttentionKeyRange {
  int64_t sequence = 0, head = 0;
  int64_t begin = 0, end = 0;
  // These keys' share of the gradient of the queries [first_query, end_query) that see them, written: query i
  // at dq + (i - first_query) * dq_row.
  int64_t first_query = 0, end_query = 0;
  float* dq = nullptr;
  int64_t dq_row = 0;
};
inline int64_t attention_backward_scratch(const AttentionInputs& in) {
  const int64_t key = attention_columns(in.key), value = attention_columns(in.value);
  return kAttentionKeys * (3 * key + 2 * value) +
         kAttentionBackwardQueries * (attention_row(in.key) + key + attention_row(in.value) + value +
                                      2 * attention_row(kAttentionKeys));
}

#define GODWIT_DECLARE(isa)                                                                                \
  namespace isa {                                                                                          \
  void attention_forward_part(const AttentionForward& args, const AttentionQueries& part, float* scratch); \
  void attention_backward_part(const AttentionBackward& args, const AttentionKeyRange& part,               \
                               const float* delta, float* scratch);                                        \
  /* delta[i] = sum over head i of dO O, for heads [begin, end) of all tokens' heads. */                   \
  void attention_delta(const AttentionBackward& args, int64_t begin, int64_t end, float* delta);           \
  }
GODWIT_DECLARE(avx2)
GODWIT_DECLARE(avx512)
#undef GODWIT_DECLARE

}  // namespace godwit::kernels
