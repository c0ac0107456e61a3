// CPU registration of Kimi Delta Attention: fp32 kernels; other dtypes are converted around them, fp64 takes
// the plain composition.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

#include "godwit/kernels/kda.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/kda_ref.h"

namespace godwit::ops {
namespace {

using std::optional;

// A tensor [T, H, width] (or [T, H]) as rows the kernels can walk: fp32, heads dense behind one another.
struct Rows {
  Tensor tensor;
  const float* data;
  int64_t stride;  // between tokens

  explicit Rows(const Tensor& x) {
    tensor = x.to(at::kFloat);
    const int64_t width = tensor.dim() == 3 ? tensor.size(2) : 1;
    const bool dense = (tensor.dim() == 2 || width == 1 || tensor.stride(2) == 1) &&
                       (tensor.size(1) == 1 || tensor.stride(1) == width);
    if (!dense) tensor = tensor.contiguous();
    data = tensor.const_data_ptr<float>();
    stride = tensor.stride(0);
  }
};

// The kernels' view of the arguments, and the tensors that keep it alive.
struct Inputs {
  Rows q, k, v, z, b;
  Tensor A_log, dt_bias, initial_state, cu;
  std::vector<int64_t> segment_offset;
  int64_t segments = 0;

  explicit Inputs(const KdaArgs& x)
      : q(x.q), k(x.k), v(x.v), z(x.z), b(x.b), A_log(x.A_log.contiguous()), dt_bias(x.dt_bias.contiguous()) {
    if (x.initial_state.has_value()) initial_state = x.initial_state->contiguous();
    if (!x.cu_seqlens.defined()) return;
    cu = x.cu_seqlens;
    const int64_t* offset = cu.const_data_ptr<int64_t>();
    for (int64_t n = 0; n + 1 < cu.numel(); ++n) {
      segment_offset.push_back(segments);
      segments += kernels::kda_saved_segments(offset[n + 1] - offset[n]);
    }
  }

  kernels::KdaInputs tokens(double gate_bound) const {
    return {.heads = q.tensor.size(1),
            .key = q.tensor.size(2),
            .value = v.tensor.size(2),
            .q = q.data,
            .k = k.data,
            .v = v.data,
            .z = z.data,
            .b = b.data,
            .q_stride = q.stride,
            .k_stride = k.stride,
            .v_stride = v.stride,
            .z_stride = z.stride,
            .b_stride = b.stride,
            .A_log = A_log.const_data_ptr<float>(),
            .dt_bias = dt_bias.const_data_ptr<float>(),
            .gate_bound = static_cast<float>(gate_bound)};
  }
  kernels::KdaSequences sequences() const {
    return {.count = cu.numel() - 1,
            .cu_seqlens = cu.const_data_ptr<int64_t>(),
            .initial_state = initial_state.defined() ? initial_state.const_data_ptr<float>() : nullptr,
            .segment_offset = segment_offset.data()};
  }
};

std::tuple<Tensor, Tensor, std::vector<Tensor>> forward_cpu(const Tensor& q, const Tensor& k, const Tensor& v,
                                                            const Tensor& z, const Tensor& A_log,
                                                            const Tensor& dt_bias, const Tensor& b,
                                                            double gate_bound,
                                                            const optional<Tensor>& initial_state,
                                                            const Tensor& cu_seqlens, bool save) {
  const at::NoGradGuard no_grad;
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  if (v.scalar_type() == at::kDouble) {
    auto [o, final_state] = ref::kda_chunk_ref(args);
    return {o, final_state, {}};
  }
  const Inputs in(args);
  const auto fp32 = v.options().dtype(at::kFloat);
  const int64_t heads = q.size(1), key = q.size(2), value = v.size(2);
  const Tensor o = at::empty(v.sizes(), fp32);
  const Tensor final_state = at::empty({cu_seqlens.numel() - 1, heads, key, value}, fp32);
  std::vector<Tensor> saved;
  if (save) saved = {at::empty({in.segments, heads, key, value}, fp32), at::empty(v.sizes(), fp32)};
  kernels::kda_chunk_forward({.in = in.tokens(gate_bound),
                              .seq = in.sequences(),
                              .o = o.data_ptr<float>(),
                              .final_state = final_state.data_ptr<float>(),
                              .states = save ? saved[0].data_ptr<float>() : nullptr,
                              .v_new = save ? saved[1].data_ptr<float>() : nullptr});
  return {o.to(v.scalar_type()), final_state, saved};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_cpu(
    const optional<Tensor>& grad_o, const optional<Tensor>& grad_final_state, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& b, double gate_bound, const optional<Tensor>& initial_state, const Tensor& cu_seqlens,
    at::TensorList saved) {
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  if (v.scalar_type() == at::kDouble) {
    const auto grads = ref::kda_chunk_ref_grads(grad_o, grad_final_state, args);
    return {grads[0], grads[1], grads[2], grads[3], grads[4], grads[5], grads[6], grads[7]};
  }
  const at::NoGradGuard no_grad;
  if (saved.empty()) {  // a recorded forward keeps nothing (traced.h)
    const auto again = std::get<2>(
        forward_cpu(q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens, /*save=*/true));
    return backward_cpu(grad_o, grad_final_state, q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state,
                        cu_seqlens, again);
  }
  TORCH_CHECK(saved.size() == 2,
              "kda_chunk_bwd: saved: expected the 2 tensors of kda_chunk_fwd with save, got ", saved.size());
  const Inputs in(args);
  const auto like = [](const Tensor& x) { return at::empty(x.sizes(), x.options().dtype(at::kFloat)); };
  const auto dense = [](const optional<Tensor>& x) {
    return x.has_value() ? x->to(at::kFloat).contiguous() : Tensor();
  };
  const auto pointer = [](const Tensor& x) { return x.defined() ? x.const_data_ptr<float>() : nullptr; };
  const Tensor go = dense(grad_o), gs = dense(grad_final_state);
  const Tensor dq = like(q), dk = like(k), dv = like(v), dz = like(z), db = like(b);
  const Tensor dA_log = like(A_log), ddt_bias = like(dt_bias);
  const Tensor d_initial = initial_state.has_value() ? like(*initial_state) : Tensor();
  kernels::kda_chunk_backward(
      {.in = in.tokens(gate_bound),
       .seq = in.sequences(),
       .states = saved[0].const_data_ptr<float>(),
       .v_new = saved[1].const_data_ptr<float>(),
       .grad_o = pointer(go),
       .grad_final_state = pointer(gs),
       .dq = dq.data_ptr<float>(),
       .dk = dk.data_ptr<float>(),
       .dv = dv.data_ptr<float>(),
       .dz = dz.data_ptr<float>(),
       .db = db.data_ptr<float>(),
       .dA_log = dA_log.data_ptr<float>(),
       .ddt_bias = ddt_bias.data_ptr<float>(),
       .d_initial_state = d_initial.defined() ? d_initial.data_ptr<float>() : nullptr});
  return {dq.to(q.scalar_type()),
          dk.to(k.scalar_type()),
          dv.to(v.scalar_type()),
          dz.to(z.scalar_type()),
          dA_log,
          ddt_bias,
          db.to(b.scalar_type()),
          d_initial};
}

Tensor step_cpu(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
                const Tensor& dt_bias, const Tensor& b, double gate_bound, Tensor& state,
                const optional<Tensor>& slots) {
  const at::NoGradGuard no_grad;
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, std::nullopt, Tensor()};
  if (v.scalar_type() == at::kDouble || state.scalar_type() != at::kFloat)
    return ref::kda_step_ref(args, state, slots);
  const Inputs in(args);
  const Tensor o = at::empty(v.sizes(), v.options().dtype(at::kFloat));
  const Tensor slot = slots.has_value() ? slots->contiguous() : Tensor();
  // The heads of a sequence must lie together; the sequences may be apart.
  const bool in_place = state.numel() == 0 || state[0].is_contiguous();
  Tensor dense = in_place ? state : state.contiguous();
  kernels::kda_step({.in = in.tokens(gate_bound),
                     .count = q.size(0),
                     .state = dense.data_ptr<float>(),
                     .state_stride = dense.stride(0),
                     .slots = slot.defined() ? slot.const_data_ptr<int64_t>() : nullptr,
                     .o = o.data_ptr<float>()});
  if (!in_place) state.copy_(dense);
  return o.to(v.scalar_type());
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CPU, m) {
  m.impl("kda_chunk_fwd", forward_cpu);
  m.impl("kda_chunk_bwd", backward_cpu);
  m.impl("kda_step_fwd", step_cpu);
}

}  // namespace godwit::ops
