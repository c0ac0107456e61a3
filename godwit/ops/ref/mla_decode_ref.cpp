#include "godwit/ops/ref/mla_decode_ref.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "godwit/ops/arguments.h"

namespace godwit::ops::ref {

at::Tensor mla_decode(const MlaDecodeArgs& x) {
  const auto work = work_type(x.q);
  const int64_t page_rows = x.pages.size(1), width = x.pages.size(2);
  const at::Tensor lengths = x.lengths.to(at::kCPU);
  const bool fp8 = x.pages.scalar_type() == at::kFloat8_e4m3fn;  // moved as bytes
  const at::Tensor stored = fp8 ? x.pages.view(at::kByte) : x.pages;
  std::vector<at::Tensor> out;
  for (int64_t n = 0; n < x.q.size(0); ++n) {
    const auto length = lengths[n].item<int64_t>();
    const int64_t first = x.window > 0 ? std::max<int64_t>(0, length - x.window) : 0;
    const int64_t page = first / page_rows, pages = (length + page_rows - 1) / page_rows - page;
    const at::Tensor index = x.table[n].narrow(0, page, pages).to(x.pages.device());
    const at::Tensor seen = stored.index_select(0, index)
                                .view({pages * page_rows, width})
                                .slice(0, first - page * page_rows, length - page * page_rows);
    const at::Tensor rows = (fp8 ? seen.view(at::kFloat8_e4m3fn) : seen).to(work);
    const at::Tensor score = at::matmul(x.q[n].to(work), rows.t()) * x.scale;  // [H, rows]
    out.push_back(at::matmul(at::softmax(score, -1), rows.narrow(1, 0, x.rank)));
  }
  if (out.empty()) return at::empty({0, x.q.size(1), x.rank}, x.q.options());
  return at::stack(out).to(x.q.scalar_type());
}

}  // namespace godwit::ops::ref
