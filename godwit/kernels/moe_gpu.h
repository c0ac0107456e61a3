// Routing on the GPU: raw device pointers and sizes, no torch. T tokens, E experts, k experts a token; a slot
// is token * k + i. All arrays are dense. Launchers only enqueue work on `stream` and allocate nothing;
// `workspace` holds at least the bytes that the function of the same name gives, aligned to 256. They return
// a cudaError_t as int (0 = launched).
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

constexpr int kRouterMaxExperts = 1024;
constexpr int kRouterMaxChosen = 31;

// The slots sorted by expert, stable: a pure function of the choices. Rows of expert e are offsets[e] to
// offsets[e + 1] of that order.
struct MoePlanArrays {
  int32_t* offsets = nullptr;      // [E + 1]
  int32_t* slot_of_row = nullptr;  // [T k]
  int32_t* row_of_slot = nullptr;  // [T k], the inverse
};

// Per token (kernels/moe_router.h without groups): s = sigmoid(logits); chosen = the k largest of s + bias,
// best first, equal values by index, NaN as -inf; weights = scale s (/ sum of the chosen s + 1e-20); cutoff =
// the (k+1)-th largest of s + bias, -inf if k = E. E is at most kRouterMaxExperts and a multiple of 4, k at
// most min(E, kRouterMaxChosen).
struct RouterParams {
  const float* logits = nullptr;  // [T, E], aligned to 16 bytes
  const float* bias = nullptr;    // [E], the same
  int64_t tokens = 0;
  int experts = 0;
  int k = 0;
  bool renormalize = true;  // has no effect for k = 1
  float scale = 1;
  int32_t* chosen = nullptr;  // [T, k]
  float* weights = nullptr;   // [T, k]
  float* scores = nullptr;    // [T, E], optional
  float* cutoff = nullptr;    // [T]
  bool wants_plan = false;
  MoePlanArrays plan = {};
  void* workspace = nullptr;  // for the plan
  CUstream_st* stream = nullptr;
};
int moe_router_fwd(const RouterParams& p);

// d_logits [T, E], zero but for the chosen.
struct RouterBwdParams {
  const float* d_weights = nullptr;  // [T, k]
  const float* scores = nullptr;     // [T, E]
  const int32_t* chosen = nullptr;   // [T, k]
  float* d_logits = nullptr;         // [T, E], aligned to 16 bytes
  int64_t tokens = 0;
  int experts = 0;
  int k = 0;
  bool renormalize = true;
  float scale = 1;
  CUstream_st* stream = nullptr;
};
int moe_router_bwd(const RouterBwdParams& p);

// The plan of given choices. k at most 32; a choice outside [0, E) has no row.
struct MoePlanParams {
  const int32_t* chosen = nullptr;  // [T, k]
  int64_t tokens = 0;
  int experts = 0;
  int k = 0;
  MoePlanArrays plan = {};
  void* workspace = nullptr;
  CUstream_st* stream = nullptr;
};
size_t moe_plan_workspace_bytes(int experts);
int moe_plan(const MoePlanParams& p);

// Quantile Balancing statistics (kernels/qb_histogram.h): counts [E, B] += histogram of cutoff_t - s_te, s =
// scores or, from_logits, their sigmoid. B is at most kHistogramMaxBins.
constexpr int kHistogramMaxBins = 1700;
struct HistogramParams {
  const float* scores = nullptr;  // [T, E]
  bool from_logits = false;
  const float* cutoff = nullptr;  // [T]
  int64_t tokens = 0;
  int experts = 0;
  int bins = 0;
  float range_min = 0;
  float bins_per_unit = 0;
  int64_t* counts = nullptr;
  CUstream_st* stream = nullptr;
};
int qb_histogram(const HistogramParams& p);

}  // namespace godwit::kernels::cuda
