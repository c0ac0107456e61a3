// Newton-Schulz for Muon: our kernel for many small fp32 matrices on the CPU, batched GEMMs for everything
// else.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "godwit/kernels/newton_schulz.h"
#include "godwit/ops/dispatch.h"
#include "godwit/ops/ops.h"

namespace godwit::ops {
namespace {

// Large matrices on a GPU: blocks of rows that a symmetric product is computed in, each up to the diagonal.
// Four leave 10 of 16 blocks, whose products a GPU does at nearly the rate of the whole.
constexpr int64_t kSymmetricBlocks = 4, kSymmetricSide = 2048;

// alpha a b + beta c [n, s, s], which are symmetric; c may be undefined.
Tensor symmetric_product(const Tensor& a, const Tensor& b, const Tensor& c = {}, double beta = 0,
                         double alpha = 1) {
  const int64_t side = a.size(1), block = side / kSymmetricBlocks;
  if (!a.is_cuda() || side < kSymmetricSide || side % (64 * kSymmetricBlocks) != 0)
    return c.defined() ? at::baddbmm(c, a, b, beta, alpha) : at::bmm(a, b);
  Tensor out = at::empty({a.size(0), side, side}, a.options());
  for (int64_t from = 0; from < side; from += block) {
    const auto part = [&](const Tensor& x) { return x.narrow(1, from, block).narrow(2, 0, from + block); };
    const Tensor rows = a.narrow(1, from, block), columns = b.narrow(2, 0, from + block);
    Tensor to = part(out);
    if (c.defined())
      at::baddbmm_out(to, part(c), rows, columns, beta, alpha);
    else
      at::bmm_out(to, rows, columns);
  }
  static const auto mirror = typed_op<void(Tensor&, int64_t)>("godwit::mirror_lower_");
  mirror.call(out, block);
  return out;
}

// Passes over whole matrices cost as much as the products of the smaller side, so there is none but the
// products: the norm is the trace of the first Gram matrix, the division by it and the term a X go into the
// polynomial, which then is (a I + b A + c A^2) / |M|.
void by_bmm(Tensor& batch, int64_t steps, at::ScalarType compute) {
  constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;
  const bool tall = batch.size(1) > batch.size(2);
  const auto wide = compute == at::kDouble ? at::kDouble : at::kFloat;
  Tensor x = batch.to(compute);
  if (steps == 0) {
    batch.div_(at::linalg_vector_norm(batch, 2, {1, 2}, /*keepdim=*/true, wide).add_(1e-7));
    return;
  }
  for (int64_t i = 0; i < steps; ++i) {
    Tensor gram =
        tall ? symmetric_product(x.mT(), x) : symmetric_product(x, x.mT());  // A, of the smaller side
    Tensor inverse;
    if (i == 0) {
      const Tensor norm = gram.diagonal(0, 1, 2).to(wide).sum(1).sqrt_().add_(1e-7);
      inverse = norm.reciprocal_().view({-1, 1, 1});
      gram = gram.mul_(inverse.square().to(compute));
    }
    Tensor poly = symmetric_product(gram, gram, gram, kB, kC);  // b A + c A^2
    poly.diagonal(0, 1, 2).add_(kA);
    if (i == 0) poly.mul_(inverse.to(compute));
    x = tall ? at::bmm(x, poly) : at::bmm(poly, x);
  }
  batch.copy_(x);
}

void meta(Tensor& /*batch*/, int64_t /*steps*/, std::optional<at::ScalarType> /*compute*/) {}

}  // namespace

void newton_schulz_(Tensor& batch, int64_t steps, std::optional<at::ScalarType> compute) {
  TORCH_CHECK(batch.dim() == 3 && steps >= 0,
              "newton_schulz_: expected a batch [n, r, c] and steps >= 0, got ", batch.sizes(), " and ",
              steps);
  if (batch.numel() == 0) return;
  const bool own = compute.value_or(batch.scalar_type()) == batch.scalar_type();
  const bool small = std::min(batch.size(1), batch.size(2)) <= kernels::kNewtonSchulzMaxSide;
  if (batch.device().is_cpu() && batch.scalar_type() == at::kFloat && batch.is_contiguous() && small && own) {
    kernels::newton_schulz_cpu({.batch = batch.data_ptr<float>(),
                                .n = batch.size(0),
                                .rows = batch.size(1),
                                .cols = batch.size(2),
                                .steps = steps});
    return;
  }
  const bool gpu_fp32 = batch.is_cuda() && batch.scalar_type() == at::kFloat;
  by_bmm(batch, steps, compute.value_or(gpu_fp32 ? at::kBFloat16 : batch.scalar_type()));
}

// Called from C++ directly: Muon runs it inside a parallel_for.
TORCH_LIBRARY_FRAGMENT(godwit, m) {
  m.def("newton_schulz_(Tensor(a!) batch, int steps, ScalarType? compute=None) -> ()");
}
TORCH_LIBRARY_IMPL(godwit, CompositeExplicitAutograd, m) {
  m.impl("newton_schulz_", newton_schulz_);
}
TORCH_LIBRARY_IMPL(godwit, Meta, m) {
  m.impl("newton_schulz_", meta);
}

}  // namespace godwit::ops
