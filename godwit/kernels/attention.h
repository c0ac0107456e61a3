// Launchers of causal attention over packed sequences on raw pointers, fp32, flash style: no [T, T] matrix.
//
//   S = scale Q K^T over the keys a query sees, P = softmax(S), O = P V, lse = log sum exp S
//   delta = rowsum(dO O), dP = dO V^T, dS = P (dP - delta)
//   dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K
//
// Query i of a sequence with q queries and k keys stands at key position i + k - q: it sees the keys up to
// there, with a window the last `window` of them. Widths are multiples of 16. Legend: T tokens, H heads, K
// key width, V value width.
//
// Order of arithmetic: keys go in blocks of kAttentionKeys, counted from the sequence's first key; a query's
// block is an online softmax over its visible keys, blocks and keys in order. What a query does not see is
// neither added nor multiplied. So an output row depends only on its query and the keys and values it sees,
// bit for bit. Gradients of keys are sums over the queries in order; the gradient of a query is summed over
// keys in order inside each of attention_key_groups(...) groups of keys, then over the groups.
#pragma once

#include <algorithm>
#include <cstdint>

namespace godwit::kernels {

inline constexpr int64_t kAttentionKeys = 128;

// Rows [T, H, width] with `row` floats from token to token and `head` from head to head.
template <class T>
struct AttentionRows {
  T* data = nullptr;
  int64_t row = 0, head = 0;
  [[nodiscard]] T* at(int64_t t, int64_t h) const { return data + t * row + h * head; }
};

struct AttentionInputs {
  int64_t heads = 0, key = 0, value = 0;
  AttentionRows<const float> q, k, v;
  int64_t sequences = 0;
  const int64_t* cu_q = nullptr;  // [N + 1]
  const int64_t* cu_k = nullptr;  // [N + 1]
  float scale = 0;
  int64_t window = 0;  // 0 = none
};

struct AttentionForward {
  AttentionInputs in;
  float* o = nullptr;    // [Tq, H, V]
  float* lse = nullptr;  // [Tq, H], or null
};
void attention_forward(const AttentionForward& p);

struct AttentionBackward {
  AttentionInputs in;
  const float* o = nullptr;                           // [Tq, H, V]
  const float* lse = nullptr;                         // [Tq, H]
  const float* grad_o = nullptr;                      // [Tq, H, V]
  float *dq = nullptr, *dk = nullptr, *dv = nullptr;  // dense
};
void attention_backward(const AttentionBackward& p);

// Groups of neighbouring keys of one sequence whose shares of dQ are summed apart, so that few heads of a
// long sequence occupy several threads. A function of the shape only.
inline int64_t attention_key_groups(int64_t heads, int64_t keys) {
  return std::clamp<int64_t>(8 / heads, 1, std::max<int64_t>(1, keys / 2048));
}

}  // namespace godwit::kernels
