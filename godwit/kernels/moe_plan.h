// Where each token goes: the (token, slot) pairs sorted by expert, stable, so that a plan is a pure function
// of the choices. A row is a position in that order; slot s = token * k + i.
#pragma once

#include <cstdint>
#include <vector>

namespace godwit::kernels {

// A run of one expert's rows: the unit of parallel work. Its length does not depend on the number of threads,
// so neither do sums over parts.
struct MoePart {
  int32_t expert;
  int32_t begin;  // rows
  int32_t end;
  int32_t index;  // 0, 1, ... within the expert
};

inline constexpr int64_t kMoePartRows = 2048;

struct MoePlan {
  int64_t rows = 0;                  // tokens * k
  std::vector<int32_t> slot_of_row;  // [rows]
  std::vector<int32_t> first;        // [experts + 1]: rows of expert e are first[e] to first[e + 1]
  std::vector<MoePart> parts;        // used experts only, longest first, then by expert
};

// Sorts the choices [slots]; returns the first slot whose expert is outside [0, experts), or -1 and the plan.
int64_t make_moe_plan(const int32_t* choices, int64_t slots, int64_t experts, MoePlan* plan);

}  // namespace godwit::kernels
