// CUDA registration of Kimi Delta Attention: the Hopper kernels for bf16 inputs of width 128
// (docs/kda_cuda.md); everything else takes the plain composition.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>

#include "godwit/kernels/kda_heuristic.h"
#include "godwit/kernels/kda_params.h"
#include "godwit/ops/cuda/launch.h"
#include "godwit/ops/kda_chunk_states.h"
#include "godwit/ops/kda_decode.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/kda_ref.h"

namespace godwit::ops {
namespace {

namespace gpu = kernels::cuda;
using std::optional;

constexpr int64_t kWidth = 128;
constexpr int64_t kMaxRows = int64_t{1} << 28;  // tokens times heads
constexpr int64_t kMaxGrid = 65535;             // of a launch's second dimension

bool is_bf16(const Tensor& x) {
  return x.scalar_type() == at::kBFloat16;
}

// Whether the Hopper kernels take these arguments.
bool has_kernels(const KdaArgs& x) {
  const bool types = is_bf16(x.q) && is_bf16(x.k) && is_bf16(x.v) && is_bf16(x.z) &&
                     (is_bf16(x.b) || x.b.scalar_type() == at::kFloat);
  const int64_t sequences = x.cu_seqlens.defined() ? x.cu_seqlens.numel() - 1 : x.q.size(0);
  return types && x.q.size(2) == kWidth && x.v.size(2) == kWidth && x.q.numel() / kWidth <= kMaxRows &&
         sequences > 0 && sequences <= kMaxGrid && x.gate_bound >= -5.0 && cuda::is_hopper(x.q.device());
}

// A gate bound as the kernels take it: 0 is the softplus gate.
float kernel_bound(double gate_bound) {
  return gate_bound < 0 ? static_cast<float>(gate_bound) : 0.f;
}

// The kernels' view of the arguments, and the tensors that keep it alive.
struct Inputs {
  Tensor q, k, v, z, b, A_log, dt_bias, initial_state;
  cuda::Offsets offsets;
  gpu::KdaInputs raw;

  explicit Inputs(const KdaArgs& x)
      : q(cuda::dense(x.q)),
        k(cuda::dense(x.k)),
        v(cuda::dense(x.v)),
        z(cuda::dense(x.z)),
        b(cuda::dense(x.b)),
        A_log(cuda::dense(x.A_log)),
        dt_bias(cuda::dense(x.dt_bias)),
        offsets(cuda::device_offsets(x.cu_seqlens, x.q.device())) {
    if (x.initial_state.has_value()) initial_state = cuda::dense(*x.initial_state);
    raw = {.q = cuda::pointer(q),
           .k = cuda::pointer(k),
           .v = cuda::pointer(v),
           .z = cuda::pointer(z),
           .b = cuda::pointer(b),
           .A_log = cuda::pointer_as<float>(A_log),
           .dt_bias = cuda::pointer_as<float>(dt_bias),
           .initial_state = cuda::pointer_as<float>(initial_state),
           .cu_seqlens = offsets.data,
           .T = q.size(0),
           .N = static_cast<int>(x.cu_seqlens.numel() - 1),
           .H = static_cast<int>(q.size(1)),
           .max_length = offsets.longest,
           .gate_bound = kernel_bound(x.gate_bound),
           .b_fp32 = !is_bf16(b)};
  }
};

// The launch of a forward; with checkpoint_slot, states go to checkpoints.
std::tuple<Tensor, Tensor> launch_forward(const Inputs& in, const Tensor& checkpoint_slot,
                                          const Tensor& checkpoints) {
  const Tensor o = at::empty(in.v.sizes(), in.v.options());
  const Tensor final_state =
      at::empty({in.raw.N, in.q.size(1), kWidth, kWidth}, in.v.options().dtype(at::kFloat));
  const Tensor space = cuda::workspace(gpu::kda_chunk_fwd_workspace_bytes(in.raw), in.q.device());
  cuda::check_launch("kda_chunk",
                     gpu::kda_chunk_fwd({.in = in.raw,
                                         .o = cuda::pointer(o),
                                         .final_state = cuda::pointer_as<float>(final_state),
                                         .checkpoint_slot = cuda::pointer_as<int32_t>(checkpoint_slot),
                                         .checkpoints = cuda::pointer_as<float>(checkpoints),
                                         .workspace = cuda::pointer(space),
                                         .stream = c10::cuda::getCurrentCUDAStream()}));
  return {o, final_state};
}

std::tuple<Tensor, Tensor, std::vector<Tensor>> forward_cuda(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
    const Tensor& dt_bias, const Tensor& b, double gate_bound, const optional<Tensor>& initial_state,
    const Tensor& cu_seqlens, bool /*save: the backward makes again what it needs*/) {
  const at::NoGradGuard no_grad;
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  const c10::cuda::CUDAGuard guard(q.device());
  if (!has_kernels(args)) {
    auto [o, final_state] = ref::kda_chunk_ref(args);
    return {o, final_state, {}};
  }
  auto [o, final_state] = launch_forward(Inputs(args), Tensor(), Tensor());
  return {o, final_state, {}};
}

// Which row of the states each chunk of 16 tokens writes (kda_params.h), on the CPU; undefined if a boundary
// is neither a chunk's end nor a sequence's.
Tensor checkpoint_slots(const Tensor& cu_seqlens, const Tensor& at) {
  const auto* cu = cu_seqlens.const_data_ptr<int64_t>();
  const auto* place = at.const_data_ptr<int64_t>();
  const int64_t N = cu_seqlens.numel() - 1;
  Tensor slots = at::full({gpu::kda_unit_count(cu[N], N, gpu::kKdaChunk)}, -1, at::kInt);
  auto* slot = slots.mutable_data_ptr<int32_t>();
  int64_t n = 0;
  for (int64_t i = 0; i < at.numel(); ++i) {
    while (cu[n + 1] < place[i]) ++n;
    const int64_t length = place[i] - cu[n];
    if (length % gpu::kKdaChunk != 0 && place[i] != cu[n + 1]) return Tensor();
    slot[gpu::kda_first_unit(cu[n], n, gpu::kKdaChunk) + (length - 1) / gpu::kKdaChunk] =
        static_cast<int32_t>(i);
  }
  return slots;
}

KdaChunkStatesResult chunk_states_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z,
                                       const Tensor& A_log, const Tensor& dt_bias, const Tensor& b,
                                       double gate_bound, const optional<Tensor>& initial_state,
                                       const Tensor& cu_seqlens, const Tensor& at) {
  const at::NoGradGuard no_grad;
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  const c10::cuda::CUDAGuard guard(q.device());
  const Tensor slots = has_kernels(args) ? checkpoint_slots(cu_seqlens, at) : Tensor();
  if (!slots.defined()) return kda_chunk_states_composition(args, at);
  const Tensor states = at::empty({at.numel(), q.size(1), kWidth, kWidth}, v.options().dtype(at::kFloat));
  const auto [o, final_state] =
      launch_forward(Inputs(args), at.numel() > 0 ? cuda::to_device(slots, q.device()) : Tensor(), states);
  return {o, final_state, states};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward_cuda(
    const optional<Tensor>& grad_o, const optional<Tensor>& grad_final_state, const Tensor& q,
    const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log, const Tensor& dt_bias,
    const Tensor& b, double gate_bound, const optional<Tensor>& initial_state, const Tensor& cu_seqlens,
    at::TensorList /*saved*/) {
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, initial_state, cu_seqlens};
  const c10::cuda::CUDAGuard guard(q.device());
  if (!has_kernels(args)) {
    const auto grads = ref::kda_chunk_ref_grads(grad_o, grad_final_state, args);
    return {grads[0], grads[1], grads[2], grads[3], grads[4], grads[5], grads[6], grads[7]};
  }
  const at::NoGradGuard no_grad;
  const Inputs in(args);
  const Tensor d_o = grad_o.has_value() ? cuda::dense(grad_o->to(at::kBFloat16)) : at::zeros_like(in.v);
  const Tensor d_final =
      grad_final_state.has_value() ? cuda::dense(grad_final_state->to(at::kFloat)) : Tensor();
  const auto like = [](const Tensor& x) { return at::empty(x.sizes(), x.options()); };
  const Tensor dq = like(q), dk = like(k), dv = like(v), dz = like(z), dA_log = like(A_log),
               d_dt_bias = like(dt_bias), db = at::empty(b.sizes(), b.options().dtype(at::kFloat)),
               d_initial = initial_state.has_value() ? like(*initial_state) : Tensor();
  const Tensor space = cuda::workspace(gpu::kda_chunk_bwd_workspace_bytes(in.raw), q.device());
  cuda::check_launch("kda_chunk backward",
                     gpu::kda_chunk_bwd({.in = in.raw,
                                         .d_o = cuda::pointer(d_o),
                                         .d_final_state = cuda::pointer_as<float>(d_final),
                                         .dq = cuda::pointer(dq),
                                         .dk = cuda::pointer(dk),
                                         .dv = cuda::pointer(dv),
                                         .dz = cuda::pointer(dz),
                                         .db = cuda::pointer_as<float>(db),
                                         .dA_log = cuda::pointer_as<float>(dA_log),
                                         .d_dt_bias = cuda::pointer_as<float>(d_dt_bias),
                                         .d_initial_state = cuda::pointer_as<float>(d_initial),
                                         .workspace = cuda::pointer(space),
                                         .stream = c10::cuda::getCurrentCUDAStream()}));
  return {dq, dk, dv, dz, dA_log, d_dt_bias, db.to(b.scalar_type()), d_initial};
}

Tensor step_cuda(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& z, const Tensor& A_log,
                 const Tensor& dt_bias, const Tensor& b, double gate_bound, Tensor& state,
                 const optional<Tensor>& slots) {
  const at::NoGradGuard no_grad;
  const KdaArgs args{q, k, v, z, A_log, dt_bias, b, gate_bound, std::nullopt, Tensor()};
  const c10::cuda::CUDAGuard guard(q.device());
  // The kernel has no state of zeros for rows without a slot.
  const bool all_have_state = !slots.has_value() || slots->ge(0).all().item<bool>();
  if (!has_kernels(args) || !all_have_state) return ref::kda_step_ref(args, state, slots);
  const Tensor x[3] = {cuda::dense(q), cuda::dense(k), cuda::dense(v)};
  const Tensor z_dense = cuda::dense(z), b_dense = cuda::dense(b), A = cuda::dense(A_log),
               dt = cuda::dense(dt_bias);
  const Tensor slot = slots.has_value() ? cuda::to_device(slots->to(at::kInt), q.device()) : Tensor();
  const bool in_place = state[0].is_contiguous() && state.stride(0) % 4 == 0 && cuda::aligned(state);
  const Tensor held = in_place ? state : cuda::dense(state);
  const Tensor o = at::empty(v.sizes(), v.options());
  cuda::check_launch("kda_step",
                     gpu::kda_step({.x = {cuda::pointer(x[0]), cuda::pointer(x[1]), cuda::pointer(x[2])},
                                    .x_stride = q.size(1) * kWidth,
                                    .z = cuda::pointer(z_dense),
                                    .b = cuda::pointer(b_dense),
                                    .A_log = cuda::pointer_as<float>(A),
                                    .dt_bias = cuda::pointer_as<float>(dt),
                                    .slot = cuda::pointer_as<int32_t>(slot),
                                    .state = cuda::pointer(held),
                                    .state_stride = held.stride(0),
                                    .state_bf16 = is_bf16(held),
                                    .y = cuda::pointer(o),
                                    .B = static_cast<int>(q.size(0)),
                                    .H = static_cast<int>(q.size(1)),
                                    .b_fp32 = !is_bf16(b),
                                    .gate_bound = kernel_bound(gate_bound),
                                    .stream = c10::cuda::getCurrentCUDAStream()}));
  if (!in_place) state.copy_(held);
  return o;
}

bool decode_has_kernel(const KdaDecodeArgs& a) {
  const Tensor* bf16[] = {&a.q, &a.k, &a.v, &a.z, &a.gate, &a.conv_q, &a.conv_k, &a.conv_v};
  const Tensor* fp32[] = {&a.q_conv, &a.k_conv, &a.v_conv, &a.A_log, &a.dt_bias, &a.o_norm};
  const auto is_fp32 = [](const Tensor& x) { return x.scalar_type() == at::kFloat; };
  const bool types =
      std::all_of(std::begin(bf16), std::end(bf16), [](const Tensor* x) { return is_bf16(*x); }) &&
      std::all_of(std::begin(fp32), std::end(fp32), [&](const Tensor* x) { return is_fp32(*x); }) &&
      (is_bf16(a.b) || is_fp32(a.b)) && (is_bf16(a.state) || is_fp32(a.state));
  const bool in_place = a.conv_q.is_contiguous() && a.conv_k.is_contiguous() && a.conv_v.is_contiguous() &&
                        a.state.is_contiguous() && cuda::aligned(a.state);
  return types && in_place && a.state.size(2) == kWidth && a.q_conv.size(1) == 4 &&
         a.q.size(0) / a.tokens <= kMaxGrid && a.gate_bound >= -5.0 && cuda::is_hopper(a.q.device());
}

Tensor decode_cuda(const KdaDecodeArgs& a) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(a.q.device());
  if (!decode_has_kernel(a)) return kda_decode_composition(a);
  const int64_t width = a.q.size(1);
  const Tensor q = cuda::dense(a.q), k = cuda::dense(a.k), v = cuda::dense(a.v), z = cuda::dense(a.z),
               gate = cuda::dense(a.gate), b = cuda::dense(a.b), wq = cuda::dense(a.q_conv),
               wk = cuda::dense(a.k_conv), wv = cuda::dense(a.v_conv), A = cuda::dense(a.A_log),
               dt = cuda::dense(a.dt_bias), norm = cuda::dense(a.o_norm),
               slots = a.slots.has_value() ? a.slots->contiguous() : Tensor(),
               keep = a.keep.has_value() ? a.keep->contiguous() : Tensor();
  const Tensor y = at::empty(q.sizes(), q.options());
  const auto fp32 = [](const Tensor& x) { return cuda::pointer_as<float>(x); };
  cuda::check_launch("kda_decode",
                     gpu::kda_step({.x = {cuda::pointer(q), cuda::pointer(k), cuda::pointer(v)},
                                    .x_stride = width,
                                    .z = cuda::pointer(z),
                                    .b = cuda::pointer(b),
                                    .gate = cuda::pointer(gate),
                                    .conv_weight = {fp32(wq), fp32(wk), fp32(wv)},
                                    .A_log = fp32(A),
                                    .dt_bias = fp32(dt),
                                    .norm_weight = fp32(norm),
                                    .slot = cuda::pointer_as<int32_t>(slots),
                                    .keep = cuda::pointer_as<int32_t>(keep),
                                    .conv_state = {cuda::pointer(a.conv_q), cuda::pointer(a.conv_k),
                                                   cuda::pointer(a.conv_v)},
                                    .conv_stride = width * 3,
                                    .state = cuda::pointer(a.state),
                                    .state_bf16 = is_bf16(a.state),
                                    .y = cuda::pointer(y),
                                    .B = static_cast<int>(q.size(0) / a.tokens),
                                    .H = static_cast<int>(a.state.size(1)),
                                    .tokens = static_cast<int>(a.tokens),
                                    .b_fp32 = !is_bf16(b),
                                    .gate_bound = kernel_bound(a.gate_bound),
                                    .norm_eps = static_cast<float>(a.norm_eps),
                                    .stream = c10::cuda::getCurrentCUDAStream()}));
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(godwit, CUDA, m) {
  m.impl("kda_chunk_fwd", forward_cuda);
  m.impl("kda_chunk_bwd", backward_cuda);
  m.impl("kda_chunk_states_fwd", chunk_states_cuda);
  m.impl("kda_step_fwd", step_cuda);
  m.impl("kda_decode_fwd", kda_decode_unpacked<decode_cuda>);
}

}  // namespace godwit::ops
