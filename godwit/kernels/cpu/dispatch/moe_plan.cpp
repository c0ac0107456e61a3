#include "godwit/kernels/moe_plan.h"

#include <algorithm>

namespace godwit::kernels {

int64_t make_moe_plan(const int32_t* choices, int64_t slots, int64_t experts, MoePlan* plan) {
  plan->rows = slots;
  plan->first.assign(experts + 1, 0);
  plan->parts.clear();
  for (int64_t s = 0; s < slots; ++s) {
    if (choices[s] < 0 || choices[s] >= experts) return s;
    ++plan->first[choices[s] + 1];
  }
  for (int64_t e = 0; e < experts; ++e) plan->first[e + 1] += plan->first[e];
  std::vector<int32_t> next(plan->first.begin(), plan->first.end() - 1);
  plan->slot_of_row.resize(slots);
  for (int64_t s = 0; s < slots; ++s) plan->slot_of_row[next[choices[s]]++] = static_cast<int32_t>(s);
  for (int64_t e = 0; e < experts; ++e) {
    int32_t index = 0;
    for (int64_t row = plan->first[e]; row < plan->first[e + 1]; row += kMoePartRows) {
      plan->parts.push_back(
          {.expert = static_cast<int32_t>(e),
           .begin = static_cast<int32_t>(row),
           .end = static_cast<int32_t>(std::min<int64_t>(plan->first[e + 1], row + kMoePartRows)),
           .index = index++});
    }
  }
  std::stable_sort(plan->parts.begin(), plan->parts.end(),
                   [](const MoePart& a, const MoePart& b) { return a.end - a.begin > b.end - b.begin; });
  return -1;
}

}  // namespace godwit::kernels
