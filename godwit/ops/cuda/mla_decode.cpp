// CUDA registration of mla_decode: our kernels (docs/mla_cuda.md) for bf16 q over rows of bf16 or e4m3, ranks
// of 256 and 512 with 64 positional values, pages of 64; everything else takes the plain composition.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "godwit/kernels/mla_decode_cuda.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/mla_decode_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;

// Pages that the longest sequence sees; 0 where only the device knows.
int64_t most_pages(const Tensor& lengths, int64_t window) {
  if (lengths.is_cuda()) return 0;
  const Tensor length = lengths.contiguous();
  const auto* rows = length.const_data_ptr<int64_t>();
  int64_t most = 1;
  for (int64_t n = 0; n < length.numel(); ++n) {
    const int64_t first = window > 0 ? std::max<int64_t>(0, rows[n] - window) : 0;
    most = std::max(most, (rows[n] + gpu::kMlaPageRows - 1) / gpu::kMlaPageRows - first / gpu::kMlaPageRows);
  }
  return most;
}

// Where bits must not depend on the batch, all sequences are cut alike.
gpu::MlaCut choose_cut(const gpu::MlaDecodeParams& p, int64_t pages) {
  constexpr int kPart = 16;
  if (pages == 0 || !at::globalContext().deterministicAlgorithms()) return gpu::mla_decode_cut(p, pages);
  return {.part_pages = kPart, .parts = static_cast<int>((pages + kPart - 1) / kPart)};
}

bool takes(const Tensor& q, const Tensor& pages, int64_t rank) {
  const bool rows = pages.scalar_type() == at::kFloat8_e4m3fn || pages.scalar_type() == at::kBFloat16;
  return q.scalar_type() == at::kBFloat16 && rows && pages.is_contiguous() && cuda::aligned(pages) &&
         cuda::is_hopper(q.device()) && gpu::mla_decode_supports(q.size(2), rank, pages.size(1));
}

Tensor fwd_cuda(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                int64_t rank, double scale, int64_t window) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(q.device());
  if (!takes(q, pages, rank))
    return ref::mla_decode({q, pages, table.to(at::kCPU), lengths.to(at::kCPU), rank, scale, window});
  const auto there = [&](const Tensor& t) {
    return t.is_cuda() ? t.contiguous() : cuda::to_device(t.contiguous(), q.device());
  };
  const Tensor query = cuda::dense(q), index = there(table), length = there(lengths);
  const Tensor o = at::empty({q.size(0), q.size(1), rank}, q.options());
  gpu::MlaDecodeParams p{.sequences = static_cast<int>(q.size(0)),
                         .heads = static_cast<int>(q.size(1)),
                         .rank = static_cast<int>(rank),
                         .q = cuda::pointer(query),
                         .pages = cuda::pointer(pages),
                         .fp8 = pages.scalar_type() == at::kFloat8_e4m3fn,
                         .page_count = pages.size(0),
                         .page_stride = pages.stride(0),
                         .row_stride = pages.stride(1),
                         .table = cuda::pointer_as<int32_t>(index),
                         .table_stride = static_cast<int>(index.size(1)),
                         .lengths = cuda::pointer_as<int64_t>(length),
                         .window = window,
                         .cut = {},
                         .scale = static_cast<float>(scale),
                         .o = cuda::pointer(o),
                         .workspace = nullptr,
                         .stream = c10::cuda::getCurrentCUDAStream()};
  p.cut = choose_cut(p, most_pages(lengths, window));
  const Tensor space = cuda::workspace(gpu::mla_decode_workspace_bytes(p), q.device());
  p.workspace = cuda::pointer(space);
  cuda::check_launch("mla_decode", gpu::mla_decode(p));
  return o;
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("mla_decode_fwd", fwd_cuda);
}

}  // namespace godwit::ops
