#include "godwit/ops/ref/attn_res_mix_ref.h"

#include <ATen/ATen.h>

#include "godwit/ops/arguments.h"

namespace godwit::ops::ref {

at::Tensor attn_res_mix(at::TensorList sources, const at::Tensor& norm_weight, const at::Tensor& query,
                        double eps) {
  const auto work = work_type(sources[0]);
  const at::Tensor v_STD = at::stack(sources).to(work);
  const at::Tensor key_D = norm_weight.to(work) * query.to(work);
  const at::Tensor rstd_ST = at::rsqrt(v_STD.square().mean(-1) + eps);
  const at::Tensor alpha_ST = at::softmax(at::matmul(v_STD, key_D) * rstd_ST, 0);
  return (alpha_ST.unsqueeze(-1) * v_STD).sum(0).to(sources[0].scalar_type());
}

}  // namespace godwit::ops::ref
