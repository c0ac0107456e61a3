#include "godwit/ops/attention_documents.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "godwit/ops/flash_packed.h"

namespace godwit::ops {
namespace {

using at::Tensor;

constexpr int64_t kLong = 2048;  // from here on a call of its own and the filling pay

// A long document, or a run of short ones.
struct Piece {
  int64_t tokens = 0;
  std::vector<int64_t> offsets = {0};
  bool is_long = false;
};

std::vector<Piece> pieces_of(const Tensor& cu) {
  const Tensor offsets = cu.contiguous();
  const auto* at = offsets.const_data_ptr<int64_t>();
  std::vector<Piece> pieces;
  for (int64_t n = 0; n + 1 < offsets.numel(); ++n) {
    const int64_t tokens = at[n + 1] - at[n];
    const bool is_long = tokens >= kLong;
    if (tokens == 0) continue;
    if (pieces.empty() || is_long || pieces.back().is_long) pieces.emplace_back().is_long = is_long;
    Piece& piece = pieces.back();
    piece.tokens += tokens;
    piece.offsets.push_back(piece.tokens);
  }
  return pieces;
}

// [tokens, H, D] rows of one document.
Tensor one_document(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const int64_t tokens = q.size(0), fill = planned_length(tokens) - tokens;
  const auto heads_first = [&](const Tensor& x) {
    return (fill > 0 ? at::constant_pad_nd(x, {0, 0, 0, 0, 0, fill}) : x).transpose(0, 1).unsqueeze(0);
  };
  const Tensor o = at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {},
                                                    /*dropout_p=*/0.0, /*is_causal=*/true, scale);
  return o.squeeze(0).transpose(0, 1).narrow(0, 0, tokens);
}

}  // namespace

int64_t planned_length(int64_t tokens) {
  const auto below =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(1, tokens))));
  const int64_t step = std::max<int64_t>(512, below / 8);
  return (tokens + step - 1) / step * step;
}

bool takes_attention_by_documents(const Tensor& q, const Tensor& v, const Tensor& cu) {
  return takes_flash_packed(q, v) && v.size(2) < q.size(2) && v.size(2) % 8 == 0 && cu.numel() > 1 &&
         cu.diff().max().item<int64_t>() >= kLong;
}

Tensor attention_by_documents(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu,
                              double scale) {
  const std::vector<Piece> pieces = pieces_of(cu);
  std::vector<int64_t> tokens;
  for (const Piece& piece : pieces) tokens.push_back(piece.tokens);
  // Split, not narrowed: the gradient of N narrows is N tensors of the whole length, that of a split is one.
  const std::vector<Tensor> qs = at::split_with_sizes(q, tokens), ks = at::split_with_sizes(k, tokens),
                            vs = at::split_with_sizes(v, tokens);
  std::vector<Tensor> out;
  for (size_t i = 0; i < pieces.size(); ++i) {
    if (pieces[i].is_long) {
      out.push_back(one_document(qs[i], ks[i], vs[i], scale));
    } else {
      const Tensor offsets = at::tensor(pieces[i].offsets, at::kLong);
      out.push_back(flash_packed(qs[i], ks[i], vs[i], offsets, offsets, {.scale = scale}));
    }
  }
  return out.size() == 1 ? out[0].contiguous() : at::cat(out);
}

}  // namespace godwit::ops
