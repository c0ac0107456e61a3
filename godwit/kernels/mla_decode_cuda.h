// Absorbed multi-head latent attention for one query a sequence over paged latents, on a Hopper GPU:
// mla_decode.h with q and o in bf16, rows of rank + 64 values in bf16 or e4m3, pages of 64 rows that lie
// densely. Raw device pointers: table and lengths, too, are only read by the kernels, so a launch can be
// recorded and replayed over other lengths. A launcher only enqueues work on `stream` and allocates nothing;
// it returns a cudaError_t as int.
//
// A sequence is cut into parts; each is an online softmax, and the results are merged in order. With the same
// cut a sequence's bits depend on no other.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

inline constexpr int kMlaPageRows = 64, kMlaPositions = 64;  // values of a row after the latent

// How sequences are cut: in `parts` parts, of part_pages pages each (parts: of the longest) or, where
// part_pages is 0, each sequence in even parts.
struct MlaCut {
  int part_pages = 0;
  int parts = 1;
};
struct MlaDecodeParams {
  int sequences = 0;
  int heads = 0;
  int rank = 512;               // or 256
  const void* q = nullptr;      // [N, H, rank + 64]
  const void* pages = nullptr;  // [page_count, 64, rank + 64]
  bool fp8 = false;             // pages of e4m3, else bf16
  int64_t page_count = 0;
  int64_t page_stride = 0;  // values from page to page and from row to row: multiples of 16 bytes
  int64_t row_stride = 0;
  const int32_t* table = nullptr;  // [N, table_stride]
  int table_stride = 0;
  const int64_t* lengths = nullptr;  // [N]; 0: the output is 0
  int64_t window = 0;
  MlaCut cut;
  float scale = 0;
  void* o = nullptr;          // [N, H, rank]
  void* workspace = nullptr;  // mla_decode_workspace_bytes
  CUstream_st* stream = nullptr;
};
bool mla_decode_supports(int64_t width, int64_t rank, int64_t page_rows);
// The cut that suits p, whose sequences see at most `pages` pages; 0: only the device knows.
MlaCut mla_decode_cut(const MlaDecodeParams& p, int64_t pages);
size_t mla_decode_workspace_bytes(const MlaDecodeParams& p);
int mla_decode(const MlaDecodeParams& p);

}  // namespace godwit::kernels::cuda
