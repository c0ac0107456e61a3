#include "godwit/kernels/mla_decode.h"

#include <algorithm>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/mla_decode_isa.h"

namespace godwit::kernels {
namespace {

constexpr int64_t kGrainProducts = int64_t{1} << 17;  // multiply-adds worth a thread

// What a thread takes: a part for some of the heads. Which heads go together changes no bit.
struct Task {
  MlaPart part;
  int64_t cost_before = 0;  // rows times heads of all tasks before this one
};

// Calls fn(i) for every task, neighbours together, every thread about the same cost.
template <class Fn>
void for_tasks(const std::vector<Task>& tasks, int64_t cost, int64_t threads, const Fn& fn) {
  parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
    const auto first_at = [&](int64_t thread) {
      const int64_t bound = cost * thread / threads;
      return std::partition_point(tasks.begin(), tasks.end(),
                                  [&](const Task& t) { return t.cost_before < bound; });
    };
    const auto end = to == threads ? tasks.end() : first_at(to);
    for (auto it = first_at(from); it < end; ++it) fn(*it);
  });
}

}  // namespace

void mla_decode(const MlaDecode& p) {
  if (p.sequences == 0 || p.heads == 0) return;
  std::vector<int64_t> first_part = {0};  // by sequence
  std::vector<MlaPart> parts;
  int64_t rows = 0;
  for (int64_t n = 0; n < p.sequences; ++n) {
    const int64_t length = p.lengths[n], size = mla_part_rows(length);
    const int64_t visible = p.window > 0 ? std::max<int64_t>(0, length - p.window) : 0;
    for (int64_t begin = visible; begin < length;) {
      const int64_t end = std::min(length, (begin / size + 1) * size);
      parts.push_back({.sequence = n, .begin = begin, .end = end});
      begin = end;
    }
    first_part.push_back(static_cast<int64_t>(parts.size()));
    rows += length - visible;
  }
  const auto count = static_cast<int64_t>(parts.size());
  const Scratch scratch(count * p.heads * (p.rank + 2));
  float* statistics = scratch.data() + count * p.heads * p.rank;
  const int64_t cost = rows * p.heads;
  const int64_t worth = std::max<int64_t>(1, cost * (p.width + p.rank) / kGrainProducts);
  const int64_t threads = std::min<int64_t>(num_threads(), worth);
  const int64_t tiles = (p.heads + 3) / 4;
  const int64_t groups = threads == 1 ? 1 : std::clamp<int64_t>(2 * threads / count, 1, tiles);
  std::vector<Task> tasks;
  int64_t before = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t g = 0; g < groups; ++g) {
      MlaPart part = parts[i];
      part.head = tiles * g / groups * 4;
      part.head_end = std::min(p.heads, tiles * (g + 1) / groups * 4);
      part.values = scratch.data() + i * p.heads * p.rank;
      part.statistics = statistics + i * p.heads * 2;
      tasks.push_back({part, before});
      before += (part.end - part.begin) * (part.head_end - part.head);
    }
  }
  for_tasks(tasks, cost, threads, [&](const Task& t) { GODWIT_DISPATCH(mla_decode_part, p, t.part); });
  const int64_t each = p.rank * ((count + p.sequences - 1) / p.sequences);
  parallel_for(0, p.sequences * p.heads, std::max<int64_t>(1, kGrainProducts / each),
               [&](int64_t from, int64_t to) {
                 for (int64_t i = from; i < to; ++i) {
                   const int64_t n = i / p.heads, h = i % p.heads, first = first_part[n] * p.heads + h;
                   GODWIT_DISPATCH(mla_decode_merge, p, first_part[n + 1] - first_part[n],
                                   statistics + first * 2, scratch.data() + first * p.rank, p.o + i * p.rank);
                 }
               });
}

}  // namespace godwit::kernels
