#include "godwit/ops/ref/rotate_ref.h"

#include <ATen/ATen.h>

namespace godwit::ops::ref {
namespace {

using at::Tensor;

// x [P, H, d] times turns [P, d / 2] complex.
Tensor turned(const Tensor& x, const Tensor& turns) {
  const Tensor pairs = at::view_as_complex(
      x.to(at::toRealValueType(turns.scalar_type())).reshape({x.size(0), x.size(1), x.size(2) / 2, 2}));
  return at::view_as_real(pairs * turns.unsqueeze(1)).flatten(2).to(x.scalar_type());
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> rotate_qkv(const Tensor& qkv, const Tensor& turns) {
  const Tensor by = at::view_as_complex(turns);
  return {turned(qkv.select(1, 0), by), turned(qkv.select(1, 1), by),
          qkv.select(1, 2).clone(at::MemoryFormat::Contiguous)};
}

Tensor rotate_qkv_grad(const Tensor& d_q, const Tensor& d_k, const Tensor& d_v, const Tensor& turns) {
  const Tensor back = at::view_as_complex(turns).conj().resolve_conj();
  return at::stack({turned(d_q, back), turned(d_k, back), d_v}, 1);
}

}  // namespace godwit::ops::ref
