// Forward of one expert's rows. Two forms with the same order of arithmetic (tile.h), so the same bits:
//   many rows   weights repacked by panels, products on register tiles, the gated unit panel by panel
//   few rows    (decode) each weight read once, transposed in registers and used at once
#include <algorithm>
#include <type_traits>

#include "godwit/kernels/cpu/glu_math.h"
#include "godwit/kernels/cpu/moe_experts_isa.h"
#include "godwit/kernels/cpu/moe_tile.h"
#include "godwit/kernels/cpu/weight_rows.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

// One expert's matrices, of one of the kinds of weight_rows.h.
template <class Rows>
struct ExpertRows {
  Rows w1, w3, w2;
};

template <class Rows>
ExpertRows<Rows> expert_rows(const MoeWeights& w, const MoeShape& s, int64_t e) {
  const auto rows = [&](const void* data, const void* scale, int64_t count, int64_t width) {
    if constexpr (std::is_same_v<Rows, Int8Rows>) {
      return Rows{static_cast<const int8_t*>(data), width, static_cast<const float*>(scale)}.from(e * count);
    } else if constexpr (std::is_same_v<Rows, Mxfp4Rows>) {
      return Rows{static_cast<const uint8_t*>(data), width, static_cast<const uint8_t*>(scale)}.from(e *
                                                                                                     count);
    } else {
      return Rows{static_cast<decltype(Rows::data)>(data), width}.from(e * count);
    }
  };
  return {.w1 = rows(w.w1, w.s1, s.inner, s.width),
          .w3 = rows(w.w3, w.s3, s.inner, s.width),
          .w2 = rows(w.w2, w.s2, s.width, s.inner)};
}

// A [m, I] = glu(X W1^T, X W3^T) for kRows rows x[r]; inner rows a[r]; keep[r] (if not null) gets both
// products.
template <int kRows, class Rows>
void few_rows_inner(const MoeShape& s, const ExpertRows<Rows>& w, const GluConstants& glu,
                    const float* const (&x)[kRows], float* const (&a)[kRows], float* const (&keep)[kRows]) {
  for (int64_t i0 = 0; i0 < s.inner; i0 += kLanes) {
    Vec g[kRows] = {}, u[kRows] = {};
    for (int64_t l0 = 0; l0 < s.width; l0 += kLanes) {
      const int64_t cols = std::min<int64_t>(kLanes, s.width - l0);
      const auto multiply = [&](const Rows& matrix, Vec(&sum)[kRows]) {
        Vec block[kLanes];
        matrix.from(i0 + kLanes).prefetch(l0, s.inner - i0 - kLanes);
        matrix.from(i0).load(l0, s.inner - i0, cols, block);
        for (int64_t j = 0; j < cols; ++j) {
          for (int r = 0; r < kRows; ++r) sum[r] = fma(splat(x[r][l0 + j]), block[j], sum[r]);
        }
      };
      multiply(w.w1, g);
      multiply(w.w3, u);
    }
    for (int r = 0; r < kRows; ++r) {
      store(a[r] + i0, glu_value(glu, g[r], u[r]));
      if (keep[r] != nullptr) {
        store(keep[r] + i0, g[r]);
        store(keep[r] + moe_padded(s.inner) + i0, u[r]);
      }
    }
  }
}

// Y [m, L] = A W2^T.
template <int kRows, class Rows>
void few_rows_outer(const MoeShape& s, const ExpertRows<Rows>& w, const float* const (&a)[kRows],
                    float* const (&y)[kRows]) {
  for (int64_t l0 = 0; l0 < s.width; l0 += kLanes) {
    Vec sum[kRows] = {};
    for (int64_t i0 = 0; i0 < s.inner; i0 += kLanes) {
      const int64_t cols = std::min<int64_t>(kLanes, s.inner - i0);
      Vec block[kLanes];
      w.w2.from(l0 + kLanes).prefetch(i0, s.width - l0 - kLanes);
      w.w2.from(l0).load(i0, s.width - l0, cols, block);
      for (int64_t j = 0; j < cols; ++j) {
        for (int r = 0; r < kRows; ++r) sum[r] = fma(splat(a[r][i0 + j]), block[j], sum[r]);
      }
    }
    for (int r = 0; r < kRows; ++r) store(y[r] + l0, sum[r]);
  }
}

template <int kRows, class Rows>
void few_rows(const MoeForward& args, const MoeForwardPart& task, const ExpertRows<Rows>& w) {
  const MoeShape& s = args.shape;
  const GluConstants glu(s.form);
  const float* x[kRows];
  float* a[kRows];
  float* keep[kRows];
  float* y[kRows];
  const float* inner[kRows];
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = task.part.begin + r, slot = task.slot_of_row[row];
    x[r] = args.z + slot / s.k * s.width;
    inner[r] = a[r] = task.scratch + r * moe_padded(s.inner);
    keep[r] = args.saved == nullptr ? nullptr : args.saved + row * 2 * moe_padded(s.inner);
    y[r] = task.y + slot * moe_padded(s.width);
    if (keep[r] != nullptr) std::memset(keep[r], 0, 2 * moe_padded(s.inner) * sizeof(float));
  }
  few_rows_inner<kRows>(s, w, glu, x, a, keep);
  few_rows_outer<kRows>(s, w, inner, y);
}

template <class Rows>
void many_rows(const MoeForward& args, const MoeForwardPart& task, const ExpertRows<Rows>& w) {
  const MoeShape& s = args.shape;
  const GluConstants glu(s.form);
  const int64_t padded = moe_padded(s.inner), ldx = row_stride(s.width), lda = row_stride(s.inner);
  float* x = task.scratch;
  float* a = x + kBlockRows * ldx;
  float* gu = a + kBlockRows * lda;
  float* panel = gu + kBlockRows * kPanel;
  for_blocks(task.part, [&](int64_t begin, int64_t m) {
    const int32_t* slots = task.slot_of_row + begin;
    const auto row = [&](int64_t r) { return args.z + slots[r] / s.k * s.width; };
    gather_rows(m, s.width, row,
                [&](int64_t r) { std::memcpy(x + r * ldx, row(r), s.width * sizeof(float)); });
    float* saved = args.saved == nullptr ? nullptr : args.saved + begin * 2 * padded;
    for (int64_t i0 = 0; i0 < padded; i0 += kLanes) {
      const int64_t first = std::min(i0, s.inner), rows = s.inner - first;
      pack_weight_rows(panel, w.w1.from(first), rows, s.width, kLanes);
      pack_weight_rows(panel + kLanes, w.w3.from(first), rows, s.width, kLanes);
      gemm_panel<false>(m, s.width, x, ldx, panel, ZeroInit(), [&](int64_t r, Vec g, Vec u) {
        store(gu + r * kPanel, g);
        store(gu + r * kPanel + kLanes, u);
      });
      for (int64_t r = 0; r < m; ++r) {
        const Vec g = load(gu + r * kPanel), u = load(gu + r * kPanel + kLanes);
        store(a + r * lda + i0, glu_value(glu, g, u));
        if (saved == nullptr) continue;
        stream(saved + r * 2 * padded + i0, g);
        stream(saved + r * 2 * padded + padded + i0, u);
      }
    }
    for (int64_t l0 = 0; l0 < s.width; l0 += kPanel) {
      pack_weight_rows(panel, w.w2.from(l0), s.width - l0, s.inner, kPanel);
      const int64_t half = std::min<int64_t>(l0 + kLanes, s.width);
      pack_weight_rows(panel + kLanes, w.w2.from(half), s.width - half, s.inner, kPanel);
      gemm_panel<false>(m, s.inner, a, lda, panel, ZeroInit(), [&](int64_t r, Vec y0, Vec y1) {
        float* y = task.y + slots[r] * moe_padded(s.width) + l0;
        if (task.large) {
          stream(y, y0);
          stream(y + kLanes, y1);
        } else {
          store(y, y0);
          store(y + kLanes, y1);
        }
      });
    }
  });
}

template <class Rows>
void forward(const MoeForward& args, const MoeForwardPart& task) {
  const auto w = expert_rows<Rows>(args.w, args.shape, task.part.expert);
  switch (task.part.end - task.part.begin) {
    case 1:
      return few_rows<1>(args, task, w);
    case 2:
      return few_rows<2>(args, task, w);
    case 3:
      return few_rows<3>(args, task, w);
    case 4:
      return few_rows<4>(args, task, w);
    default:
      return many_rows(args, task, w);
  }
}

}  // namespace

void moe_fwd_part(const MoeForward& args, const MoeForwardPart& task) {
  switch (args.w.format) {
    case MoeFormat::kFp32:
      return forward<PlainRows<float>>(args, task);
    case MoeFormat::kBf16:
      return forward<PlainRows<uint16_t>>(args, task);
    case MoeFormat::kInt8:
      return forward<Int8Rows>(args, task);
    case MoeFormat::kMxfp4:
      return forward<Mxfp4Rows>(args, task);
  }
}

void moe_combine(const MoeShape& s, int64_t begin, int64_t end, const float* y, const float* weights,
                 float* out) {
  const int64_t padded = moe_padded(s.width);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t l0 = 0; l0 < s.width; l0 += kLanes) {
      const float* from = y + t * s.k * padded + l0;
      Vec sum = {};
      for (int64_t i = 0; i < s.k; ++i) {
        const Vec row = load(from + i * padded);
        sum = weights == nullptr ? sum + row : fma(splat(weights[t * s.k + i]), row, sum);
      }
      if (l0 + kLanes <= s.width) {
        store(out + t * s.width + l0, sum);
      } else {
        std::memcpy(out + t * s.width + l0, &sum, (s.width - l0) * sizeof(float));
      }
    }
  }
}

void add_to(int64_t n, const float* x, float* sum) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(sum + i, load(sum + i) + load(x + i));
  for (; i < n; ++i) sum[i] += x[i];
}

}  // namespace godwit::kernels::GODWIT_ISA
