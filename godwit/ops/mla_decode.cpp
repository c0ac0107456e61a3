// mla_decode: absorbed multi-head latent attention for one query a sequence over paged latents
// (docs/attention.md). On the CPU our kernel, for rows of fp32 or bf16; elsewhere the composition in
// ref/mla_decode_ref.cpp.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "godwit/kernels/mla_decode.h"
#include "godwit/ops/autograd_util.h"
#include "godwit/ops/checks.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/mla_decode_ref.h"
#include "godwit/ops/traced.h"

namespace godwit::ops {
namespace {

constexpr const char* kOp = "mla_decode";

// Every sequence has a row, and its visible rows lie in pages that exist.
void check_rows(const MlaDecodeArgs& x) {
  const Tensor lengths = x.lengths.contiguous(), table = x.table.contiguous();
  const auto* length = lengths.const_data_ptr<int64_t>();
  const auto* page = table.const_data_ptr<int32_t>();
  const int64_t columns = table.size(1), pages = x.pages.size(0), page_rows = x.pages.size(1);
  for (int64_t n = 0; n < x.q.size(0); ++n) {
    TORCH_CHECK(length[n] >= 1 && length[n] <= columns * page_rows, kOp, ": lengths: expected 1 to ",
                columns * page_rows, " (the table's ", columns, " pages), got ", length[n], " at ", n);
    const int64_t first = x.window > 0 ? std::max<int64_t>(0, length[n] - x.window) : 0;
    const int64_t end = (length[n] + page_rows - 1) / page_rows;
    const int32_t* const row = page + n * columns;
    for (int64_t m = first / page_rows; m < end; ++m)
      TORCH_CHECK(row[m] >= 0 && row[m] < pages, kOp, ": table: expected pages below ", pages, ", got ",
                  row[m], " at [", n, ", ", m, "]");
  }
}

void check_arguments(const MlaDecodeArgs& x) {
  check_floating(kOp, "q", x.q);
  if (x.pages.scalar_type() != at::kFloat8_e4m3fn) check_floating(kOp, "pages", x.pages);
  check_sizes(kOp, "q", x.q, {-1, -1, -1});
  check_sizes(kOp, "pages", x.pages, {-1, -1, x.q.size(2)});
  check_sizes(kOp, "table", x.table, {x.q.size(0), -1});
  check_sizes(kOp, "lengths", x.lengths, {x.q.size(0)});
  check_dtype(kOp, "table", x.table, at::kInt);
  check_dtype(kOp, "lengths", x.lengths, at::kLong);
  check_device(kOp, "pages", x.pages, x.q.device());
  const at::Device where = x.table.is_cuda() ? x.q.device() : at::Device(at::kCPU);
  check_device(kOp, "table", x.table, where);
  check_device(kOp, "lengths", x.lengths, where);
  TORCH_CHECK(x.q.size(1) > 0 && x.pages.size(1) > 0, kOp,
              ": expected heads and pages of at least one row, got q ", x.q.sizes(), ", pages ",
              x.pages.sizes());
  TORCH_CHECK(x.rank >= 1 && x.rank <= x.q.size(2), kOp, ": rank: expected 1 to ", x.q.size(2), ", got ",
              x.rank);
  TORCH_CHECK(x.window >= 0, kOp, ": window: expected 0 (none) or positive, got ", x.window);
  if (!is_dataless(x.table) && !x.table.is_cuda()) check_rows(x);
}

Tensor fwd_composition(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                       int64_t rank, double scale, int64_t window) {
  const at::NoGradGuard no_grad;
  return ref::mla_decode({q, pages, table, lengths, rank, scale, window});
}

// The pages that the table names, in its order, in fp32.
Tensor fp32_pages(const Tensor& pages, const Tensor& table) {
  return pages.view(at::kByte)
      .index_select(0, table.flatten().clamp(0, pages.size(0) - 1))
      .view(at::kFloat8_e4m3fn)
      .to(at::kFloat);
}

Tensor fwd_cpu(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths, int64_t rank,
               double scale, int64_t window) {
  const auto type = pages.scalar_type();
  if (type == at::kFloat8_e4m3fn && q.scalar_type() != at::kDouble) {
    const Tensor own = at::arange(table.numel(), at::kInt).view(table.sizes());
    return fwd_cpu(q, fp32_pages(pages, table), own, lengths, rank, scale, window);
  }
  const bool rows_dense = pages.stride(2) == 1 || pages.size(2) == 1;
  if (q.scalar_type() == at::kDouble || (type != at::kFloat && type != at::kBFloat16) || !rows_dense) {
    return fwd_composition(q, pages, table, lengths, rank, scale, window);
  }
  const at::NoGradGuard no_grad;
  const Tensor query = q.to(at::kFloat).contiguous(), index = table.contiguous(),
               length = lengths.contiguous();
  Tensor o = at::empty({q.size(0), q.size(1), rank}, query.options());
  kernels::mla_decode({.sequences = q.size(0),
                       .heads = q.size(1),
                       .width = q.size(2),
                       .rank = rank,
                       .q = query.const_data_ptr<float>(),
                       .pages = pages.const_data_ptr(),
                       .bf16 = type == at::kBFloat16,
                       .page_rows = pages.size(1),
                       .page_stride = pages.stride(0),
                       .row_stride = pages.stride(1),
                       .table = index.const_data_ptr<int32_t>(),
                       .table_stride = index.size(1),
                       .lengths = length.const_data_ptr<int64_t>(),
                       .window = window,
                       .scale = static_cast<float>(scale),
                       .o = o.mutable_data_ptr<float>()});
  return o.to(q.scalar_type());
}

Tensor fwd_meta(const Tensor& q, const Tensor& /*pages*/, const Tensor& /*table*/, const Tensor& /*lengths*/,
                int64_t rank, double /*scale*/, int64_t /*window*/) {
  return meta_tensor({q.sym_size(0), q.sym_size(1), rank}, q);
}

Tensor decode_checked(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                      int64_t rank, double scale, int64_t window) {
  check_arguments({q, pages, table, lengths, rank, scale, window});
  TORCH_CHECK(!needs_grad(q, pages), kOp,
              ": has no gradient; call it without grad mode, or train with attention");
  static const auto op = typed_handle<decltype(fwd_cpu)>("godwit::mla_decode_fwd");
  return op.call(q, pages, table, lengths, rank, scale, window);
}

TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def(
      "mla_decode(Tensor q, Tensor pages, Tensor table, Tensor lengths, int rank, float scale, int window=0) "
      "-> "
      "Tensor");
  m.def(
      "mla_decode_fwd(Tensor q, Tensor pages, Tensor table, Tensor lengths, int rank, float scale, int "
      "window) -> "
      "Tensor");
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("mla_decode", decode_checked);
  m.impl("mla_decode_fwd", fwd_composition);
}
TORCH_LIBRARY_IMPL(godwit, Autograd, m) {
  m.impl("mla_decode", decode_checked);
}
TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("mla_decode_fwd", fwd_cpu);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("mla_decode_fwd", fwd_meta);
}

}  // namespace

Tensor mla_decode(const Tensor& q, const Tensor& pages, const Tensor& table, const Tensor& lengths,
                  int64_t rank, double scale, int64_t window) {
  static const auto op = typed_handle<decltype(decode_checked)>("godwit::mla_decode");
  return op.call(q, pages, table, lengths, rank, scale, window);
}

}  // namespace godwit::ops
