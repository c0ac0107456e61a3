// Routing on the GPU: raw device pointers and sizes, no torch. T tokens, E experts, k experts a token. All
// arrays are dense. Launchers only enqueue work on `stream` and allocate nothing. They return a cudaError_t
// as int (0 = launched).
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;

namespace godwit::kernels::cuda {

constexpr int kRouterMaxExperts = 1024;
constexpr int kRouterMaxChosen = 31;

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
  CUstream_st* stream = nullptr;
};
int moe_router_fwd(const RouterParams& p);

// d_logits [T, E], zero but for the chosen.
struct RouterBwdParams {
  const float* d_weights = nullptr;  // [T, k]
  const float* logits = nullptr;     // [T, E]; the scores are taken from them again
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
