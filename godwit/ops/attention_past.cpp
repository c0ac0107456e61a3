// PyTorch's flash kernel reaches 215 TFLOP/s at widths of 192 and 128 on an H200, cuDNN's 500 to 610, but
// that makes a plan of 65 ms for every pair of lengths. So the context is taken in blocks of one length, and
// parts of the result are joined by the logarithms of their sums of exponentials:
//   queries, cut to a multiple of kRegularQueries, over whole blocks of keys    cuDNN, no mask
//   among the rest of the keys, their own too                                  cuDNN where that is square, or
//   flash queries that are left                                                      flash
#include "godwit/ops/attention_past.h"

#include <ATen/ATen.h>

namespace godwit::ops {
namespace {

using at::Tensor;

struct Part {
  Tensor o;    // [T, H, V]
  Tensor log;  // [T, H, 1] fp32
};

// By cuDNN, [T, H, D] rows.
Part by_cudnn(const Tensor& q, const Tensor& k, const Tensor& v, bool causal, double scale) {
  const auto heads_first = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const auto out = at::_scaled_dot_product_cudnn_attention(
      heads_first(q), heads_first(k), heads_first(v), /*attn_bias=*/{}, /*compute_log_sumexp=*/true,
      /*dropout_p=*/0.0, causal, /*return_debug_mask=*/false, scale);
  const Tensor log = std::get<1>(out).reshape({q.size(1), -1}).narrow(1, 0, q.size(0));
  return {std::get<0>(out).squeeze(0).transpose(0, 1), log.transpose(0, 1).unsqueeze(2)};
}

// By flash: the diagonal ends at the last key. Values are padded to the width of keys.
Part by_flash(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const int64_t width = v.size(2);
  const Tensor values = width < q.size(2) ? at::constant_pad_nd(v, {0, q.size(2) - width}) : v;
  const auto out = at::_flash_attention_forward(q.unsqueeze(0), k.unsqueeze(0), values.unsqueeze(0), {}, {},
                                                q.size(0), k.size(0), /*dropout_p=*/0.0,
                                                /*is_causal=*/true, /*return_debug_mask=*/false, scale);
  const Tensor log = std::get<1>(out).reshape({q.size(1), -1}).narrow(1, 0, q.size(0));
  return {std::get<0>(out).squeeze(0).narrow(2, 0, width), log.transpose(0, 1).unsqueeze(2)};
}

Part join(const Part& a, const Part& b) {
  const Tensor share = at::sigmoid(b.log - a.log);
  return {at::lerp(a.o.to(at::kFloat), b.o.to(at::kFloat), share), at::logaddexp(a.log, b.log)};
}

}  // namespace

bool takes_attention_over_past(const Tensor& q, const Tensor& k, const Tensor& v) {
  const auto type = q.scalar_type();
  return q.is_cuda() && (type == at::kBFloat16 || type == at::kHalf) && q.size(0) >= kRegularQueries &&
         k.size(0) - q.size(0) >= kPastBlock && q.size(2) % 8 == 0 && q.size(2) <= 256 &&
         v.size(2) % 8 == 0 && v.size(2) <= q.size(2);
}

Tensor attention_over_past(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const int64_t past = k.size(0) - q.size(0);
  const int64_t queries = q.size(0) / kRegularQueries * kRegularQueries;
  const int64_t blocks = past / kPastBlock * kPastBlock;
  const Tensor front = q.narrow(0, 0, queries);
  const auto keys = [&](const Tensor& x, int64_t from, int64_t to) { return x.narrow(0, from, to - from); };
  Part all = past == blocks
                 ? by_cudnn(front, keys(k, past, past + queries), keys(v, past, past + queries),
                            /*causal=*/true, scale)
                 : by_flash(front, keys(k, blocks, past + queries), keys(v, blocks, past + queries), scale);
  for (int64_t from = 0; from < blocks; from += kPastBlock) {
    all = join(all, by_cudnn(front, keys(k, from, from + kPastBlock), keys(v, from, from + kPastBlock),
                             /*causal=*/false, scale));
  }
  const Tensor o = all.o.to(q.scalar_type());
  if (queries == q.size(0)) return o.contiguous();
  return at::cat({o, by_flash(q.narrow(0, queries, q.size(0) - queries), k, v, scale).o});
}

}  // namespace godwit::ops
