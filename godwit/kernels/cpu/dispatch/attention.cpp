#include "godwit/kernels/attention.h"

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/attention_isa.h"
#include "godwit/kernels/cpu/dispatch/isa.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"

namespace godwit::kernels {
namespace {

constexpr int64_t kGrainProducts = int64_t{1} << 18;  // multiply-adds worth a thread

// Calls fn(task) for all, the costliest first, on as many threads as their cost is worth.
template <class Task, class Fn>
void for_tasks(std::vector<Task>& tasks, const Fn& fn) {
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  int64_t cost = 0;
  for (const Task& task : tasks) cost += task.cost;
  const auto count = static_cast<int64_t>(tasks.size());
  if (count == 0) return;
  const int64_t threads =
      std::clamp<int64_t>(cost / kGrainProducts, 1, std::min<int64_t>(num_threads(), count));
  std::atomic<int64_t> next = 0;
  parallel_for(0, threads, 1, [&](int64_t from, int64_t to) {
    for (int64_t worker = from; worker < to; ++worker) {
      for (int64_t i = next++; i < count; i = next++) fn(tasks[i]);
    }
  });
}

struct ForwardTask : AttentionQueries {
  int64_t cost = 0;
};

// Keys of one group and head. The only group of a sequence writes dq itself; others write shares.
struct BackwardTask : AttentionKeyRange {
  int64_t cost = 0;
  int64_t share = -1;  // where its share begins in the memory of all shares, -1 = none
};

// Where the keys of a sequence are cut into groups: whole blocks, each group about as many (query, key)
// pairs.
std::vector<int64_t> group_bounds(int64_t queries, int64_t keys, int64_t window, int64_t groups) {
  std::vector<int64_t> bounds = {0};
  if (groups > 1) {
    const int64_t past = keys - queries;
    const auto pairs = [&](int64_t key) {  // queries that see the block
      const int64_t end = window > 0 ? std::min(queries, key + kAttentionKeys - 1 + window - past) : queries;
      return std::max<int64_t>(0, end - std::max<int64_t>(0, key - past));
    };
    int64_t total = 0, before = 0;
    for (int64_t key = 0; key < keys; key += kAttentionKeys) total += pairs(key);
    for (int64_t key = 0; key < keys; key += kAttentionKeys) {
      const auto group = static_cast<int64_t>(bounds.size());
      if (key > 0 && group < groups && before * groups >= total * group) bounds.push_back(key);
      before += pairs(key);
    }
  }
  bounds.push_back(keys);
  return bounds;
}

struct BackwardPlan {
  std::vector<BackwardTask> tasks;
  std::vector<std::vector<BackwardTask>> shared;  // the groups of a sequence and head, in order
  int64_t share_floats = 0;
};

BackwardPlan plan_backward(const AttentionBackward& p) {
  const AttentionInputs& in = p.in;
  BackwardPlan plan;
  for (int64_t n = 0; n < in.sequences; ++n) {
    const int64_t queries = in.cu_q[n + 1] - in.cu_q[n], keys = in.cu_k[n + 1] - in.cu_k[n];
    const int64_t past = keys - queries;
    const auto bounds = group_bounds(queries, keys, in.window, attention_key_groups(in.heads, keys));
    const bool share = bounds.size() > 2;
    for (int64_t h = 0; h < in.heads; ++h) {
      std::vector<BackwardTask> groups;
      for (size_t g = 0; g + 1 < bounds.size(); ++g) {
        BackwardTask task;
        task.sequence = n;
        task.head = h;
        task.begin = bounds[g];
        task.end = bounds[g + 1];
        task.end_query = queries;
        if (share) {
          task.first_query = std::clamp<int64_t>(task.begin - past, 0, queries);
          if (in.window > 0) {
            task.end_query = std::clamp(task.end - 1 + in.window - past, task.first_query, queries);
          }
          task.share = plan.share_floats;
          task.dq_row = in.key;
          plan.share_floats += (task.end_query - task.first_query) * in.key;
        } else {
          task.dq = p.dq + (in.cu_q[n] * in.heads + h) * in.key;
          task.dq_row = in.heads * in.key;
        }
        task.cost =
            (task.end - task.begin) * (task.end_query - task.first_query) * (3 * in.key + 2 * in.value);
        groups.push_back(task);
      }
      plan.tasks.insert(plan.tasks.end(), groups.begin(), groups.end());
      if (share) plan.shared.push_back(std::move(groups));
    }
  }
  return plan;
}

// dq of one sequence and head from its groups' shares, in their order.
void add_shares(const AttentionBackward& p, const std::vector<BackwardTask>& groups, const float* shares) {
  const AttentionInputs& in = p.in;
  const int64_t begin = in.cu_q[groups[0].sequence], queries = in.cu_q[groups[0].sequence + 1] - begin;
  const int64_t grain = std::max<int64_t>(1, kGrainProducts / 16 / in.key);
  parallel_for(0, queries, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      float* dq = p.dq + ((begin + i) * in.heads + groups[0].head) * in.key;
      bool first = true;
      for (const BackwardTask& g : groups) {
        if (i < g.first_query || i >= g.end_query) continue;
        const float* share = shares + g.share + (i - g.first_query) * in.key;
        for (int64_t d = 0; d < in.key; ++d) dq[d] = first ? share[d] : dq[d] + share[d];
        first = false;
      }
    }
  });
}

}  // namespace

void attention_forward(const AttentionForward& p) {
  const AttentionInputs& in = p.in;
  std::vector<ForwardTask> tasks;
  for (int64_t n = 0; n < in.sequences; ++n) {
    const int64_t queries = in.cu_q[n + 1] - in.cu_q[n], past = in.cu_k[n + 1] - in.cu_k[n] - queries;
    const int64_t blocks = (queries + kAttentionQueries - 1) / kAttentionQueries;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t begin = queries * i / blocks, end = queries * (i + 1) / blocks;
      const int64_t keys = in.window > 0 ? std::min(in.window + end - begin, past + end) : past + end;
      for (int64_t h = 0; h < in.heads; ++h) {
        tasks.push_back({{n, h, begin, end}, (end - begin) * keys * (in.key + in.value)});
      }
    }
  }
  for_tasks(tasks, [&](const ForwardTask& task) {
    GODWIT_DISPATCH(attention_forward_part, p, task, thread_scratch(attention_forward_scratch(in)));
  });
}

void attention_backward(const AttentionBackward& p) {
  const AttentionInputs& in = p.in;
  const int64_t tokens = in.cu_q[in.sequences];
  const Scratch delta(tokens * in.heads);
  parallel_for(
      0, tokens * in.heads, std::max<int64_t>(1, kGrainProducts / in.value),
      [&](int64_t from, int64_t to) { GODWIT_DISPATCH(attention_delta, p, from, to, delta.data()); });
  BackwardPlan plan = plan_backward(p);
  const Scratch shares(plan.share_floats);
  for (BackwardTask& task : plan.tasks) {
    if (task.share >= 0) task.dq = shares.data() + task.share;
  }
  for_tasks(plan.tasks, [&](const BackwardTask& task) {
    GODWIT_DISPATCH(attention_backward_part, p, task, delta.data(),
                    thread_scratch(attention_backward_scratch(in)));
  });
  for (const auto& groups : plan.shared) add_shares(p, groups, shares.data());
}

}  // namespace godwit::kernels
