// Backward of one expert's rows X [m, L] with D = d out [m, L], G = X W1^T, U = X W3^T, A = glu(G, U), p the
// weights:
//   B      = D W2                               [m, I]  gradient of A before weighting
//   d p    = rowsum(B * A)                      needs neither the expert's output nor its recomputation
//   d G, d U = p B glu'(G, U)
//   d X    = [dG | dU] [W1; W3]                 one product over 2 I
//   d W1   = dG^T X,  d W3 = dU^T X,  d W2 = D^T (p A)
// The sums over rows run over all rows of the part in order; block after block goes on from what is there.
#include <algorithm>

#include "godwit/kernels/cpu/glu_math.h"
#include "godwit/kernels/cpu/moe_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

// A block's matrices in the scratch memory. "Panels" as in tile.h, rows with an odd stride.
struct Block {
  Block(const MoeShape& s, float* scratch)
      : inner(moe_padded(s.inner)),
        ldd(row_stride(s.width)),
        ldg(row_stride(2 * inner)),
        ldb(row_stride(inner)) {
    const auto take = [&](int64_t floats) {
      float* from = scratch;
      scratch += floats;
      return from;
    };
    d = take(kBlockRows * ldd);
    x = take(kBlockRows * ldd);
    x_panels = take(kBlockRows * moe_padded(s.width));
    gu = take(kBlockRows * ldg);
    b = take(kBlockRows * ldb);
    pa_panels = take(kBlockRows * inner);
    panel = take(32 * std::max(moe_padded(s.width), 2 * inner));
    sums = take(3 * moe_padded(s.width) * inner);
    p = take(kBlockRows);
  }
  int64_t inner, ldd, ldg, ldb;
  float* d;          // [m, L]
  float* x;          // [m, L], for the recomputation only
  float* x_panels;   // [m, L]
  float* gu;         // [m, G | U], then [m, dG | dU]
  float* b;          // [m, I]
  float* pa_panels;  // p A [m, I]
  float* panel;      // one panel of weights
  float* p;          // [m]
  float* sums;       // padded sums where I or L is no multiple of a panel
};

// Where the sums of a part go: the result itself, or padded rows copied to it at the end.
struct Sums {
  float* w1;
  float* w3;
  float* w2;
  int64_t ld1;  // of w1 and w3
  int64_t ld2;
};

// The tile's rows of `sum`, columns from `column`: zero before the first block, else what the blocks before
// left.
template <bool kFirst>
struct SumInit {
  const float* sum;
  int64_t ld;
  void operator()(int64_t r, Vec& c0, Vec& c1) const {
    c0 = kFirst ? Vec{} : load(sum + r * ld);
    c1 = kFirst ? Vec{} : load(sum + r * ld + kLanes);
  }
};
struct SumStore {
  float* sum;
  int64_t ld;
  void operator()(int64_t r, Vec c0, Vec c1) const {
    store(sum + r * ld, c0);
    store(sum + r * ld + kLanes, c1);
  }
};

// sum [n, columns] (+)= lhs^T rhs, lhs [m, n] by rows, rhs [m, columns] in panels.
template <bool kFirst>
void add_product(int64_t n, int64_t columns, int64_t m, const float* lhs, int64_t ldl,
                 const float* rhs_panels, float* sum, int64_t ld) {
  for (int64_t c = 0; c < columns; c += kPanel) {
    gemm_panel<true>(n, m, lhs, ldl, rhs_panels + c * m, SumInit<kFirst>{sum + c, ld}, SumStore{sum + c, ld});
  }
}

template <class W>
void recompute(const MoeShape& s, const Expert<W>& w, int64_t m, const Block& k) {
  for (int64_t i0 = 0; i0 < k.inner; i0 += kLanes) {
    pack_pair(k.panel, w, s, i0);
    gemm_panel<false>(m, s.width, k.x, k.ldd, k.panel, ZeroInit(), [&](int64_t r, Vec g, Vec u) {
      store(k.gu + r * k.ldg + i0, g);
      store(k.gu + r * k.ldg + k.inner + i0, u);
    });
  }
}

// X, D, G, U of the block.
template <class W>
void gather(const MoeBackward& args, const int32_t* slots, const float* saved, const Expert<W>& w, int64_t m,
            const Block& k) {
  const MoeShape& s = args.shape;
  for (int64_t r = 0; r < m; ++r) k.p[r] = args.weights[slots[r]];
  const auto d_row = [&](int64_t r) { return args.d_out + slots[r] / s.k * s.width; };
  gather_rows(m, s.width, d_row,
              [&](int64_t r) { std::memcpy(k.d + r * k.ldd, d_row(r), s.width * sizeof(float)); });
  const auto z_row = [&](int64_t r) { return args.z + slots[r] / s.k * s.width; };
  gather_rows(m, s.width, z_row, [&](int64_t r) {
    pack_row(k.x_panels, m, r, z_row(r), s.width);
    if (saved != nullptr) {
      std::memcpy(k.gu + r * k.ldg, saved + r * 2 * k.inner, 2 * k.inner * sizeof(float));
    } else {
      std::memcpy(k.x + r * k.ldd, z_row(r), s.width * sizeof(float));
    }
  });
  if (saved == nullptr) recompute(s, w, m, k);
}

// From B, G, U: d p, p A, dG and dU (over G and U).
void gate_gradient(const MoeBackward& args, const int32_t* slots, int64_t m, const Block& k) {
  const GluConstants glu(args.shape.form);
  for (int64_t r = 0; r < m; ++r) {
    const Vec p = splat(k.p[r]);
    Vec d_p = {};
    for (int64_t i0 = 0; i0 < k.inner; i0 += kLanes) {
      float* g = k.gu + r * k.ldg + i0;
      float* u = g + k.inner;
      const Vec b = load(k.b + r * k.ldb + i0);
      const GluGradient f = glu_gradient(glu, load(g), load(u));
      d_p = fma(b, f.value, d_p);
      const Vec pb = p * b;
      store(g, pb * f.by_g);
      store(u, pb * f.by_u);
      store(k.pa_panels + i0 / kPanel * m * kPanel + r * kPanel + i0 % kPanel, p * f.value);
    }
    if (args.d_weights != nullptr) args.d_weights[slots[r]] = reduce_add(d_p);
  }
}

// B = D W2.
template <class W>
void inner_gradient(const MoeShape& s, const Expert<W>& w, int64_t m, const Block& k) {
  for (int64_t i0 = 0; i0 < k.inner; i0 += kPanel) {
    const int64_t columns = std::clamp<int64_t>(s.inner - i0, 0, kPanel);
    for (int64_t l = 0; l < s.width; ++l) pack_row(k.panel, s.width, l, w.w2 + l * s.inner + i0, columns);
    if (columns == 0) std::memset(k.panel, 0, s.width * kPanel * sizeof(float));
    gemm_panel<false>(m, s.width, k.d, k.ldd, k.panel, ZeroInit(), SumStore{k.b + i0, k.ldb});
  }
}

// d X, to the rows' slots.
template <class W>
void input_gradient(const MoeShape& s, const Expert<W>& w, const MoeBackwardPart& task, const int32_t* slots,
                    int64_t m, const Block& k) {
  for (int64_t l0 = 0; l0 < s.width; l0 += kPanel) {
    const int64_t columns = std::min<int64_t>(s.width - l0, kPanel);
    for (int64_t i = 0; i < k.inner; ++i) {
      float* row1 = k.panel + i * kPanel;
      float* row3 = row1 + k.inner * kPanel;
      if (i < s.inner) {
        pack_row(row1, 1, 0, w.w1 + i * s.width + l0, columns);
        pack_row(row3, 1, 0, w.w3 + i * s.width + l0, columns);
      } else {
        std::memset(row1, 0, kPanel * sizeof(float));
        std::memset(row3, 0, kPanel * sizeof(float));
      }
    }
    gemm_panel<false>(m, 2 * k.inner, k.gu, k.ldg, k.panel, ZeroInit(), [&](int64_t r, Vec c0, Vec c1) {
      float* to = task.d_x + slots[r] * moe_padded(s.width) + l0;
      if (task.large) {
        stream(to, c0);
        stream(to + kLanes, c1);
      } else {
        store(to, c0);
        store(to + kLanes, c1);
      }
    });
  }
}

template <bool kFirst>
void weight_gradient(const MoeShape& s, int64_t m, const Block& k, const Sums& sums) {
  add_product<kFirst>(s.inner, s.width, m, k.gu, k.ldg, k.x_panels, sums.w1, sums.ld1);
  add_product<kFirst>(s.inner, s.width, m, k.gu + k.inner, k.ldg, k.x_panels, sums.w3, sums.ld1);
  add_product<kFirst>(s.width, s.inner, m, k.d, k.ldd, k.pa_panels, sums.w2, sums.ld2);
}

void copy_rows(int64_t rows, int64_t columns, const float* from, int64_t ld, float* to) {
  if (from == to) return;
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * columns, from + r * ld, columns * sizeof(float));
}

template <class W>
void backward(const MoeBackward& args, const MoeBackwardPart& task) {
  const MoeShape& s = args.shape;
  const auto w = expert_of<W>(args.w, s, task.part.expert);
  const Block k(s, task.scratch);
  const int64_t width = moe_padded(s.width);
  const bool direct1 = width == s.width, direct2 = k.inner == s.inner;
  const Sums sums{.w1 = direct1 ? task.d_w1 : k.sums,
                  .w3 = direct1 ? task.d_w3 : k.sums + k.inner * width,
                  .w2 = direct2 ? task.d_w2 : k.sums + 2 * k.inner * width,
                  .ld1 = width,
                  .ld2 = k.inner};
  for_blocks(task.part, [&](int64_t begin, int64_t m) {
    const int32_t* slots = task.slot_of_row + begin;
    gather(args, slots, args.saved == nullptr ? nullptr : args.saved + begin * 2 * k.inner, w, m, k);
    inner_gradient(s, w, m, k);
    gate_gradient(args, slots, m, k);
    if (task.d_x != nullptr) input_gradient(s, w, task, slots, m, k);
    if (task.d_w1 == nullptr) return;
    begin == task.part.begin ? weight_gradient<true>(s, m, k, sums) : weight_gradient<false>(s, m, k, sums);
  });
  if (task.d_w1 == nullptr) return;
  copy_rows(s.inner, s.width, sums.w1, width, task.d_w1);
  copy_rows(s.inner, s.width, sums.w3, width, task.d_w3);
  copy_rows(s.width, s.inner, sums.w2, k.inner, task.d_w2);
}

}  // namespace

void moe_bwd_part(const MoeBackward& args, const MoeBackwardPart& task) {
  args.w.format == MoeFormat::kBf16 ? backward<uint16_t>(args, task) : backward<float>(args, task);
}

}  // namespace godwit::kernels::GODWIT_ISA
