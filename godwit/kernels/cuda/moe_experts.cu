// The routed experts. Forward: plan, gather, two grouped products, weighted sum. Backward, with x and d the
// rows of z and of d_out in the experts' order, a the activation and p the slots' weights:
//   da = W2^T d;  from G = W1 x, U = W3 x, kept or computed again: dp = rowsum(da a), [dG | dU] = p da dglu;
//   dW2 = d^T (p a), dW1 = dG^T x, dW3 = dU^T x;  dx = W1^T dG + W3^T dU, summed over a token's slots for dz.
#include <cuda_runtime.h>

#include "godwit/kernels/cuda/sm90/experts_launch.cuh"
#include "godwit/kernels/cuda/sm90/packed_rows.h"
#include "godwit/kernels/moe_experts_cuda.h"

namespace godwit::kernels::cuda {
namespace {

struct ForwardSpace {
  sm90::ExpertPlan plan;
  void* x = nullptr;  // [rows, width]: z sorted by expert, then the experts' outputs
  void* h = nullptr;  // [rows, inner]
};

struct BackwardSpace {
  sm90::ExpertPlan plan;
  void* x = nullptr;          // [rows, width]
  void* d = nullptr;          // [rows, width]: of d_out, then the rows of dz
  void* d_gate_up = nullptr;  // [rows, 2 inner]; first the products, where they were not kept
  void* act = nullptr;        // [rows, inner]: da, then p a
};

// Takes pieces of the workspace one after another; null memory only counts.
struct Taker {
  char* memory;
  size_t at;
  void* bytes(size_t count) {
    void* here = memory + at;
    at += (count + 255) / 256 * 256;
    return here;
  }
  void* rows(const sm90::ExpertPlan& plan, int64_t width) { return bytes(size_t(plan.max_rows * width * 2)); }
};

size_t layout(const MoeShape& shape, void* memory, ForwardSpace* s) {
  Taker take{static_cast<char*>(memory), sm90::layout_plan(shape, memory, &s->plan)};
  s->x = take.rows(s->plan, shape.width);
  s->h = take.rows(s->plan, shape.inner);
  return take.at;
}

size_t layout(const MoeShape& shape, void* memory, BackwardSpace* s) {
  Taker take{static_cast<char*>(memory), sm90::layout_plan(shape, memory, &s->plan)};
  s->x = take.rows(s->plan, shape.width);
  s->d = take.rows(s->plan, shape.width);
  s->d_gate_up = take.rows(s->plan, 2 * shape.inner);
  s->act = take.rows(s->plan, shape.inner);
  return take.at;
}

// Runs the steps until one fails.
template <class... Steps>
int in_order(const Steps&... steps) {
  cudaError_t error = cudaSuccess;
  ((error == cudaSuccess ? void(error = steps()) : void()), ...);
  return error;
}

int zero_gradients(const MoeBackwardParams& p) {
  const MoeShape& s = p.shape;
  const size_t weights = size_t(s.experts * s.inner * s.width) * 2;
  const auto zero = [&](void* at, size_t bytes) {
    return [=, &p] {
      return at == nullptr || bytes == 0 ? cudaSuccess : cudaMemsetAsync(at, 0, bytes, p.stream);
    };
  };
  return in_order(zero(p.d_z, size_t(s.tokens * s.width) * 2), zero(p.d_w1, weights), zero(p.d_w3, weights),
                  zero(p.d_w2, weights));
}

// Packed experts whose widths fill whole boxes of the tensor copies go through wgmma (experts_mxfp4.cuh).
bool takes_boxes(const MoeShape& s) {
  return s.width % 512 == 0 && s.inner % 512 == 0;
}

// Rows of the widest tile of a plan for these sizes.
int tile_rows(const MoeShape& s, MoeFormat format) {
  if (format == MoeFormat::kBf16) return sm90::kTileRows;
  return format == MoeFormat::kMxfp4 && takes_boxes(s) ? sm90::packed_tile_rows() : sm90::packed_rows_tile(s);
}

// Weights that are packed in any widths: x has the experts' outputs only.
int packed_rows_forward(const MoeForwardParams& p, const ForwardSpace& b) {
  const MoeShape& s = p.shape;
  const sm90::ExpertPlan& plan = b.plan;
  return in_order([&] { return sm90::launch_plan(plan, p.experts, int(s.experts), p.stream); },
                  [&] { return sm90::launch_packed_rows_glu(plan, s, p.w, p.z, b.h, p.stream); },
                  [&] { return sm90::launch_packed_rows_out(plan, s, p.w, b.h, b.x, p.stream); },
                  [&] { return sm90::launch_combine(plan, b.x, p.weights, s, p.out, p.stream); });
}

}  // namespace

size_t moe_experts_fwd_workspace_bytes(const MoeShape& shape) {
  ForwardSpace space;
  space.plan.tile_rows = 16;  // the most tiles that any plan has
  return layout(shape, nullptr, &space);
}

bool moe_experts_fwd_takes(const MoeShape& s, MoeFormat format) {
  if (format == MoeFormat::kFp32) return false;
  const int64_t multiple = format == MoeFormat::kBf16 ? 8 : format == MoeFormat::kInt8 ? 16 : 32;
  return s.width > 0 && s.inner > 0 && s.width % multiple == 0 && s.inner % multiple == 0 && s.experts > 0 &&
         s.experts <= 4096 && s.tokens * s.k <= int64_t{1} << 30;
}

int moe_experts_fwd(const MoeForwardParams& p) {
  const MoeShape& s = p.shape;
  if (s.tokens == 0) return cudaSuccess;
  if (s.k == 0) return cudaMemsetAsync(p.out, 0, s.tokens * s.width * 2, p.stream);
  ForwardSpace b;
  b.plan.tile_rows = tile_rows(s, p.w.format);
  layout(s, p.workspace, &b);
  const bool packed = p.w.format != MoeFormat::kBf16;
  if (packed && !(p.w.format == MoeFormat::kMxfp4 && takes_boxes(s))) return packed_rows_forward(p, b);
  const sm90::ExpertPlan& plan = b.plan;
  const int k = int(s.k), width = int(s.width);
  return in_order([&] { return sm90::launch_plan(plan, p.experts, int(s.experts), p.stream); },
                  [&] {
                    return packed ? sm90::launch_gather_permuted(plan, p.z, k, width, b.x, p.stream)
                                  : sm90::launch_gather(plan, p.z, k, width, b.x, p.stream);
                  },
                  [&] {
                    return packed ? sm90::launch_packed_glu_product(plan, s, p.w, b.x, b.h, p.stream)
                                  : sm90::launch_glu_product(
                                        plan, s,
                                        {.w1 = p.w.w1, .w3 = p.w.w3, .x = b.x, .h = b.h, .gate_up = p.saved},
                                        p.stream);
                  },
                  [&] {
                    return packed ? sm90::launch_packed_out_product(plan, s, p.w, b.h, b.x, p.stream)
                                  : sm90::launch_out_product(plan, s, p.w.w2, b.h, b.x, p.stream);
                  },
                  [&] { return sm90::launch_combine(plan, b.x, p.weights, s, p.out, p.stream); });
}

size_t moe_experts_saved_bytes(const MoeShape& shape) {
  sm90::ExpertPlan plan;
  sm90::layout_plan(shape, nullptr, &plan);
  return size_t(plan.max_rows * shape.inner) * 4;
}

size_t moe_experts_bwd_workspace_bytes(const MoeShape& shape) {
  BackwardSpace space;
  return layout(shape, nullptr, &space);
}

int moe_experts_bwd(const MoeBackwardParams& p) {
  const MoeShape& s = p.shape;
  if (s.tokens * s.k == 0) return zero_gradients(p);
  BackwardSpace b;
  layout(s, p.workspace, &b);
  const sm90::ExpertPlan& plan = b.plan;
  const int width = int(s.width), inner = int(s.inner), experts = int(s.experts);
  const sm90::Rows x{b.x, width, width}, d{b.d, width, width}, act{b.act, inner, inner},
      d_gate{b.d_gate_up, inner, 2 * inner},
      d_up{static_cast<uint16_t*>(b.d_gate_up) + inner, inner, 2 * inner};
  const auto weight_gradient = [&](const sm90::Rows& left, const sm90::Rows& right, void* out) {
    return [&, out] {
      return out == nullptr ? cudaSuccess
                            : sm90::launch_weight_gradient(plan, experts, left, right, out, p.stream);
    };
  };
  const auto products = [&] {
    return p.saved != nullptr ? cudaSuccess
                              : sm90::launch_glu_product(plan, s,
                                                         {.w1 = p.w.w1,
                                                          .w3 = p.w.w3,
                                                          .x = b.x,
                                                          .h = b.act,  // nobody's
                                                          .gate_up = b.d_gate_up},
                                                         p.stream);
  };
  const sm90::GluGradientCall inner_gradient{.gate_up = p.saved != nullptr ? p.saved : b.d_gate_up,
                                             .weights = p.weights,
                                             .d_gate_up = b.d_gate_up,
                                             .act = b.act,
                                             .d_weights = p.d_weights};
  const auto input_gradient = [&] {
    if (p.d_z == nullptr) return cudaSuccess;
    const cudaError_t error = sm90::launch_transposed_product(plan, experts, {p.w.w1, p.w.w3, inner, width},
                                                              b.d_gate_up, b.d, p.stream);
    return error == cudaSuccess ? sm90::launch_combine(plan, b.d, nullptr, s, p.d_z, p.stream) : error;
  };
  return in_order([&] { return sm90::launch_plan(plan, p.experts, experts, p.stream); },
                  [&] { return sm90::launch_gather(plan, p.z, int(s.k), width, b.x, p.stream); },
                  [&] { return sm90::launch_gather(plan, p.d_out, int(s.k), width, b.d, p.stream); },
                  products,
                  [&] {
                    return sm90::launch_transposed_product(plan, experts, {p.w.w2, nullptr, width, inner},
                                                           b.d, b.act, p.stream);
                  },
                  [&] { return sm90::launch_glu_gradient(plan, s, inner_gradient, p.stream); },
                  weight_gradient(d, act, p.d_w2), weight_gradient(d_gate, x, p.d_w1),
                  weight_gradient(d_up, x, p.d_w3), input_gradient);
}

}  // namespace godwit::kernels::cuda
