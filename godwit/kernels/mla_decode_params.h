// Launcher of mla_decode on a GPU (see mla_decode.cu), without torch: raw pointers on the device.
#pragma once

#include <cstddef>
#include <cstdint>

namespace godwit::kernels::cuda {

// As kernels/mla_decode.h, but everything, table and lengths too, lies on the device, so that a launch says
// nothing about how long the sequences are and can be recorded in a graph. bf16; pages of 64 rows; width and
// rank are multiples of 64 up to 576 and 512, heads any number.
struct MlaDecodeParams {
  const void* q = nullptr;           // [N, H, D]
  const void* pages = nullptr;       // [pages, 64, D] bf16, or e4m3 with `fp8`
  const int32_t* table = nullptr;    // [N, table_stride]
  const int64_t* lengths = nullptr;  // [N], 0: the row is not used, its output is 0
  int64_t table_stride = 0;
  int N = 0, H = 0, D = 0, rank = 0;
  bool fp8 = false;
  int64_t window = 0;
  float scale = 0;
  void* o = nullptr;          // [N, H, rank]
  void* workspace = nullptr;  // mla_decode_workspace_bytes
  void* stream = nullptr;     // cudaStream_t
};
bool mla_decode_supports(int width, int rank, int page_rows);
size_t mla_decode_workspace_bytes(const MlaDecodeParams& p);
int mla_decode(const MlaDecodeParams& p);  // cudaError_t

}  // namespace godwit::kernels::cuda
