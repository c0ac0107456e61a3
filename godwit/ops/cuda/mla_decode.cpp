// CUDA registration of mla_decode: our kernel for bf16 rows in pages of 64 (kernels/cuda/mla_decode.cu) and
// the one for long contexts (kernels/mla_decode_long.h);
// everything else takes the plain composition.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>

#include "godwit/kernels/mla_decode_long.h"
#include "godwit/kernels/mla_decode_params.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/mla_decode_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;

// Whether the kernel for long contexts (docs/mla_cuda.md) takes these: lengths known here, the longest worth
// its while. It cuts sequences as suits the batch, so it has no place where bits must not depend on the
// batch.
bool takes_long(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                int64_t rank) {
  constexpr int64_t kLong = 16384;
  return !table.is_cuda() && q.size(0) > 0 && q.size(0) <= 65535 && q.size(2) == gpu::kMlaWidth &&
         rank == gpu::kMlaRank && pages.size(1) == gpu::kMlaPageRows &&
         !at::globalContext().deterministicAlgorithms() && lengths.max().item<int64_t>() >= kLong;
}

// The tensors are on the device, the lengths here.
Tensor decode_long(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                   double scale, int64_t window) {
  const Tensor there_table = cuda::to_device(table.contiguous(), q.device());
  const Tensor length = lengths.contiguous(), there_lengths = cuda::to_device(length, q.device());
  const auto* rows = length.const_data_ptr<int64_t>();
  const int sequences = static_cast<int>(q.size(0)), heads = static_cast<int>(q.size(1));
  int64_t most = 1;  // pages that a sequence sees
  for (int n = 0; n < sequences; ++n) {
    const int64_t first = window > 0 ? std::max<int64_t>(0, rows[n] - window) : 0;
    most = std::max(most, (rows[n] + 63) / 64 - first / 64);
  }
  const int part = gpu::mla_decode_long_part_pages(most, sequences, heads);
  const int parts = static_cast<int>((most + part - 1) / part);
  const Tensor query = cuda::dense(q);
  const Tensor o = at::empty({q.size(0), q.size(1), gpu::kMlaRank}, q.options());
  const Tensor space =
      cuda::workspace(gpu::mla_decode_long_workspace_bytes(sequences, heads, parts), q.device());
  cuda::check_launch("mla_decode", gpu::mla_decode_long({.sequences = sequences,
                                                         .heads = heads,
                                                         .q = cuda::pointer(query),
                                                         .pages = cuda::pointer(pages),
                                                         .page_count = pages.size(0),
                                                         .page_stride = pages.stride(0),
                                                         .row_stride = pages.stride(1),
                                                         .table = cuda::pointer_as<int32_t>(there_table),
                                                         .table_stride = static_cast<int>(table.size(1)),
                                                         .lengths = cuda::pointer_as<int64_t>(there_lengths),
                                                         .window = window,
                                                         .part_pages = part,
                                                         .parts = parts,
                                                         .scale = static_cast<float>(scale),
                                                         .o = cuda::pointer(o),
                                                         .workspace = cuda::pointer(space),
                                                         .stream = c10::cuda::getCurrentCUDAStream()}));
  return o;
}

Tensor fwd_cuda(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                int64_t rank, double scale, int64_t window) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(q.device());
  const bool fp8 = pages.scalar_type() == at::kFloat8_e4m3fn;
  const bool bf16 = q.scalar_type() == at::kBFloat16 && (fp8 || pages.scalar_type() == at::kBFloat16);
  const bool supported = bf16 && pages.is_contiguous() && cuda::aligned(pages) &&
                         cuda::is_hopper(q.device()) &&
                         gpu::mla_decode_supports(static_cast<int>(q.size(2)), static_cast<int>(rank),
                                                  static_cast<int>(pages.size(1)));
  if (!supported) return ref::mla_decode({q, pages, table.to(at::kCPU), lengths, rank, scale, window});
  if (!fp8 && takes_long(q, pages, table, lengths, rank))
    return decode_long(q, pages, table, lengths, scale, window);
  const auto there = [&](const Tensor& t) {
    return t.is_cuda() ? t.contiguous() : cuda::to_device(t, q.device());
  };
  const Tensor query = cuda::dense(q), index = there(table), length = there(lengths);
  Tensor o = at::empty({q.size(0), q.size(1), rank}, q.options());
  gpu::MlaDecodeParams p{.q = cuda::pointer(query),
                         .pages = cuda::pointer(pages),
                         .table = cuda::pointer_as<int32_t>(index),
                         .lengths = cuda::pointer_as<int64_t>(length),
                         .table_stride = index.size(1),
                         .N = static_cast<int>(q.size(0)),
                         .H = static_cast<int>(q.size(1)),
                         .D = static_cast<int>(q.size(2)),
                         .rank = static_cast<int>(rank),
                         .fp8 = fp8,
                         .window = window,
                         .scale = static_cast<float>(scale),
                         .o = cuda::pointer(o),
                         .workspace = nullptr,
                         .stream = c10::cuda::getCurrentCUDAStream()};
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
