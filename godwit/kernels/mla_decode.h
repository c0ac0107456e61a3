// Launcher of absorbed multi-head latent attention for one query a sequence over paged latents, raw pointers.
//
//   o[n, h] = sum_r softmax_r(scale q[n, h] . x_r) x_r[0..rank)      r over the visible rows x of sequence n
//
// All heads share a row: it is read from memory once, for scores and values. Row r of sequence n lies in page
// table[n * table_stride + r / page_rows], at row r % page_rows. Legend: N sequences, H heads, D row width.
//
// Order of arithmetic: the rows of a sequence are cut by their numbers into parts of mla_part_rows(length)
// and these into blocks of kMlaBlock rows. A part is an online softmax over its blocks in order; the parts
// are merged in order. So the result for a sequence depends neither on the others, nor on its pages, nor on
// threads.
#pragma once

#include <cstdint>

namespace godwit::kernels {

inline constexpr int64_t kMlaBlock = 32;

// Rows of a part: small enough for a short context to occupy several threads, and never more than about 64
// parts, since every part leaves a result of [H, rank] behind.
inline int64_t mla_part_rows(int64_t length) {
  constexpr int64_t kSmallest = 256, kMostParts = 64;
  const int64_t least = (length + kMostParts - 1) / kMostParts;
  return (least + kSmallest - 1) / kSmallest * kSmallest;
}

struct MlaDecode {
  int64_t sequences = 0, heads = 0, width = 0, rank = 0;
  const float* q = nullptr;  // [N, H, D]
  const void* pages = nullptr;
  bool bf16 = false;        // rows of bf16, else fp32
  int64_t page_rows = 0;    // rows in a page
  int64_t page_stride = 0;  // elements from page to page
  int64_t row_stride = 0;   // elements from row to row of a page
  const int32_t* table = nullptr;
  int64_t table_stride = 0;
  const int64_t* lengths = nullptr;  // [N] rows, >= 1
  int64_t window = 0;                // > 0: only the last `window` rows
  float scale = 0;
  float* o = nullptr;  // [N, H, rank]
};
void mla_decode(const MlaDecode& p);

}  // namespace godwit::kernels
