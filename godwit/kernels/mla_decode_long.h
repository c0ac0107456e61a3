// Absorbed multi-head latent attention for one query a sequence over paged latents, on a Hopper GPU:
// mla_decode.h with q, pages and o in bf16, rows of 576 values of which 512 are the latent, pages of 64 rows
// that lie densely. Raw device pointers. A launcher only enqueues work on `stream` and allocates nothing; it
// returns a cudaError_t as int.
//
// A sequence is cut into parts of part_pages pages; each is an online softmax, and the results are merged in
// order. With the same part_pages a sequence's bits depend on no other.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

inline constexpr int kMlaWidth = 576, kMlaRank = 512, kMlaPageRows = 64;

struct MlaDecodeLongParams {
  int sequences = 0;
  int heads = 0;
  const void* q = nullptr;      // [N, H, 576]
  const void* pages = nullptr;  // [page_count, 64, 576]
  int64_t page_count = 0;
  int64_t page_stride = 0;  // values from page to page and from row to row, multiples of 8
  int64_t row_stride = 0;
  const int32_t* table = nullptr;  // [N, table_stride]
  int table_stride = 0;
  const int64_t* lengths = nullptr;  // [N]
  int64_t window = 0;
  int part_pages = 16;
  int parts = 1;  // the most a sequence has
  float scale = 0;
  void* o = nullptr;  // [N, H, 512]
  void* workspace = nullptr;
  CUstream_st* stream = nullptr;
};
// The part_pages that suits `sequences` sequences of `pages` pages. kMlaPartPages is what suits one long
// sequence; used always, it makes a sequence's bits depend on itself alone.
inline constexpr int kMlaPartPages = 16;
int mla_decode_long_part_pages(int64_t pages, int sequences, int heads);
size_t mla_decode_long_workspace_bytes(int sequences, int heads, int parts);
int mla_decode_long(const MlaDecodeLongParams& p);

}  // namespace godwit::kernels::cuda
