#include "godwit/kernels/moe_experts.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/moe_experts_isa.h"

namespace godwit::kernels {
namespace {

constexpr int64_t kCombineGrain = 64;  // tokens
constexpr int64_t kCacheFloats = int64_t{2} << 20;

// Whether the rows of all slots are better written past the caches.
bool is_large(const MoeShape& shape, const MoePlan& plan) {
  return plan.rows * moe_padded(shape.width) > kCacheFloats;
}

// Calls fn(part) for each part, the next free thread taking the next part: the longest come first.
template <class Fn>
void for_parts(const MoePlan& plan, const Fn& fn) {
  std::atomic<size_t> next{0};
  parallel_for(0, num_threads(), 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < plan.parts.size(); i = next++) fn(plan.parts[i]);
  });
}

void combine(const MoeShape& shape, const float* y, const float* weights, float* out) {
  parallel_for(0, shape.tokens, kCombineGrain, [&](int64_t begin, int64_t end) {
    GODWIT_DISPATCH(moe_combine, shape, begin, end, y, weights, out);
  });
}

// Adds the sums of an expert's second and further parts to its first, in order.
void add_later_parts(const MoeBackward& args, const MoePlan& plan, const std::vector<int64_t>& place,
                     const float* later) {
  const int64_t matrix = args.shape.inner * args.shape.width;
  std::vector<size_t> order;
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    if (place[i] >= 0) order.push_back(i);
  }
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return plan.parts[a].index < plan.parts[b].index; });
  for (const size_t i : order) {
    const float* from = later + place[i] * 3 * matrix;
    for (float* sum : {args.d_w1, args.d_w3, args.d_w2}) {
      GODWIT_DISPATCH(add_to, matrix, from, sum + plan.parts[i].expert * matrix);
      from += matrix;
    }
  }
}

// Experts without a row have a zero gradient.
void clear_unused(const MoeBackward& args, const MoePlan& plan) {
  const int64_t matrix = args.shape.inner * args.shape.width;
  for (int64_t e = 0; e < args.shape.experts; ++e) {
    if (plan.first[e] != plan.first[e + 1]) continue;
    for (float* sum : {args.d_w1, args.d_w3, args.d_w2})
      std::memset(sum + e * matrix, 0, matrix * sizeof(float));
  }
}

}  // namespace

void moe_experts_fwd(const MoeForward& args, const MoePlan& plan) {
  const Scratch y(plan.rows * moe_padded(args.shape.width));
  for_parts(plan, [&](const MoePart& part) {
    const MoeForwardPart task{.part = part,
                              .slot_of_row = plan.slot_of_row.data(),
                              .y = y.data(),
                              .large = is_large(args.shape, plan),
                              .scratch = thread_scratch(moe_fwd_scratch(args.shape))};
    GODWIT_DISPATCH(moe_fwd_part, args, task);
  });
  combine(args.shape, y.data(), args.weights, args.out);
}

void moe_experts_bwd(const MoeBackward& args, const MoePlan& plan) {
  const MoeShape& s = args.shape;
  const int64_t matrix = s.inner * s.width;
  const Scratch d_x(args.d_z == nullptr ? 0 : plan.rows * moe_padded(s.width));
  // Parts after an expert's first sum into their own place, added afterwards in their order.
  int64_t later_parts = 0;
  std::vector<int64_t> place(plan.parts.size(), -1);
  for (size_t i = 0; i < plan.parts.size(); ++i) {
    if (plan.parts[i].index > 0) place[i] = later_parts++;
  }
  const bool weights_too = args.d_w1 != nullptr;
  const Scratch later(weights_too ? later_parts * 3 * matrix : 0);
  for_parts(plan, [&](const MoePart& part) {
    MoeBackwardPart task{.part = part,
                         .slot_of_row = plan.slot_of_row.data(),
                         .d_x = args.d_z == nullptr ? nullptr : d_x.data(),
                         .large = is_large(s, plan),
                         .d_w1 = nullptr,
                         .d_w3 = nullptr,
                         .d_w2 = nullptr,
                         .scratch = thread_scratch(moe_bwd_scratch(s))};
    if (weights_too) {
      const int64_t at = place[&part - plan.parts.data()];
      const bool first = at < 0;
      task.d_w1 = first ? args.d_w1 + part.expert * matrix : later.data() + at * 3 * matrix;
      task.d_w3 = first ? args.d_w3 + part.expert * matrix : task.d_w1 + matrix;
      task.d_w2 = first ? args.d_w2 + part.expert * matrix : task.d_w3 + matrix;
    }
    GODWIT_DISPATCH(moe_bwd_part, args, task);
  });
  if (weights_too) {
    add_later_parts(args, plan, place, later.data());
    clear_unused(args, plan);
  }
  if (args.d_z != nullptr) combine(s, d_x.data(), nullptr, args.d_z);
}

}  // namespace godwit::kernels
