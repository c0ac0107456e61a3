// KDA forward. The state of a head lies in panels of kPanel columns, [V / kPanel][K][kPanel]: a panel (16 KiB
// for K = 128) stays in L1 while one chunk passes over it, and different panels never meet.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "godwit/base/parallel.h"
#include "godwit/kernels/cpu/dispatch/scratch.h"
#include "godwit/kernels/cpu/kda_tile.h"

namespace godwit::kernels::GODWIT_ISA {
namespace {

// One chunk on one panel. S [K, kPanel] becomes S'; v [16, kPanel] becomes V~; o [16, kPanel] is written; r
// is working memory of the same shape.
void chunk_panel(const Chunk& c, int64_t K, float* S, float* v, float* r, float* o, SoonList& soon) {
  for (int i = 0; i < kC; i += kTileRows) {  // R = V - (K Gamma) S
    soon.ask();
    Vec acc[kTileRows][2] = {};
    madd_tile(acc, c.kd + i * K, K, 1, S, kPanel, K);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) {
        const int64_t at = (i + m) * kPanel + n * kLanes;
        store(r + at, load(v + at) - acc[m][n]);
      }
    }
  }
  for (int i = 0; i < kC; i += kTileRows) {  // V~ = X Diag(beta) R
    Vec acc[kTileRows][2] = {};
    madd_tile(acc, c.XB + i * kC, kC, 1, r, kPanel, i + kTileRows);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) store(v + (i + m) * kPanel + n * kLanes, acc[m][n]);
    }
  }
  for (int i = 0; i < kC; i += kTileRows) {  // O = (Q Gamma) S + A V~
    soon.ask();
    Vec acc[kTileRows][2] = {};
    madd_tile(acc, c.qd + i * K, K, 1, S, kPanel, K);
    madd_tile(acc, c.A + i * kC, kC, 1, v, kPanel, i + kTileRows);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) store(o + (i + m) * kPanel + n * kLanes, acc[m][n]);
    }
  }
  for (int64_t x = 0; x < K; x += kTileRows) {  // S' = Diag(Gamma_15) S + Kbar^T V~
    Vec acc[kTileRows][2];
    for (int m = 0; m < kTileRows; ++m) {
      const Vec decay = splat(c.decay[x + m]);
      for (int n = 0; n < 2; ++n) acc[m][n] = decay * load(S + (x + m) * kPanel + n * kLanes);
    }
    madd_tile(acc, c.kbar + x, 1, K, v, kPanel, kC);
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 2; ++n) store(S + (x + m) * kPanel + n * kLanes, acc[m][n]);
    }
  }
}

// Columns v .. of a head's state [K, V] (null = zeros) <-> a panel [K, kPanel].
void load_state(float* panel, const float* from, const Widths& w, int64_t v) {
  for (int64_t x = 0; x < w.K; ++x) {
    for (int n = 0; n < 2; ++n) {
      const int64_t at = v + n * kLanes;
      const bool inside = from != nullptr && x < w.key && at < w.value;
      store(panel + x * kPanel + n * kLanes,
            inside ? load_part(from + x * w.value + at, w.value - at) : Vec{});
    }
  }
}
void store_state(float* to, const float* panel, const Widths& w, int64_t v) {
  for (int64_t x = 0; x < w.key; ++x) {
    for (int n = 0; n < 2; ++n) {
      const int64_t at = v + n * kLanes;
      if (at < w.value)
        store_part(to + x * w.value + at, load(panel + x * kPanel + n * kLanes), w.value - at);
    }
  }
}

// One sequence and head.
struct Task {
  int64_t n, h, begin, end;
  int64_t tokens() const { return end - begin; }
};

// Longest first, so that the last task to start is a short one.
std::vector<Task> list_tasks(const KdaForward& p) {
  std::vector<Task> tasks;
  for (int64_t n = 0; n < p.seq.count; ++n) {
    for (int64_t h = 0; h < p.in.heads; ++h) {
      tasks.push_back({n, h, p.seq.cu_seqlens[n], p.seq.cu_seqlens[n + 1]});
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& a, const Task& b) { return a.tokens() > b.tokens(); });
  return tasks;
}

// What one panel of a task works with: its state and three [16, kPanel] tiles.
struct PanelWork {
  float *S, *v, *r, *o;
  static int64_t tiles() { return 3 * kC * kPanel; }
  PanelWork(float* state, float* tile_memory)
      : S(state), v(tile_memory), r(v + kC * kPanel), o(r + kC * kPanel) {}
};

float* state_of(float* states, const KdaForward& p, int64_t index, int64_t h) {
  return states + (index * p.in.heads + h) * p.in.key * p.in.value;
}

void begin_panel(const KdaForward& p, const Widths& w, const Task& task, int64_t x, float* S) {
  const float* initial = p.seq.initial_state;
  if (initial != nullptr) initial += (task.n * p.in.heads + task.h) * w.key * w.value;
  load_state(S, initial, w, x);
}

// Tokens t .. t + 16 of a task on the panel of columns x ..
void run_panel(const KdaForward& p, const Widths& w, const Task& task, const Chunk& c, int64_t t, int64_t x,
               const PanelWork& work) {
  const int64_t rows = std::min<int64_t>(kC, task.end - t), width = std::min<int64_t>(kPanel, w.value - x);
  const int64_t done = t - task.begin, stride = p.in.heads * w.value, at = t * stride + task.h * w.value + x;
  if (p.states != nullptr && done > 0 && done % kKdaSegment == 0) {
    const int64_t segment = p.seq.segment_offset[task.n] + done / kKdaSegment - 1;
    store_state(state_of(p.states, p, segment, task.h), work.S, w, x);
  }
  const KdaInputs& in = p.in;
  SoonList soon(2 * kC / kTileRows);  // the same columns of the next chunk
  const int64_t next = t + kC, next_rows = std::clamp<int64_t>(task.end - next, 0, kC);
  const int64_t key_at = task.h * w.key + x, key_width = std::min<int64_t>(kPanel, w.key - x);
  soon.add(in.q + next * in.q_stride + key_at, in.q_stride, next_rows, key_width);
  soon.add(in.k + next * in.k_stride + key_at, in.k_stride, next_rows, key_width);
  soon.add(in.z + next * in.z_stride + key_at, in.z_stride, next_rows, key_width);
  soon.add(in.v + next * in.v_stride + task.h * w.value + x, in.v_stride, next_rows, width);
  load_panel(work.v, p.in.v + t * p.in.v_stride + task.h * w.value + x, p.in.v_stride, rows, width);
  chunk_panel(c, w.K, work.S, work.v, work.r, work.o, soon);
  store_panel(p.o + at, stride, work.o, rows, width);
  if (p.v_new != nullptr) store_panel(p.v_new + at, stride, work.v, rows, width);
}

// `heads` neighbouring tasks of one sequence on one thread, chunk by chunk and head by head: their rows share
// the pages of memory that a chunk touches.
void run_tasks(const KdaForward& p, const Widths& w, const Task* tasks, int64_t heads) {
  const int64_t begin = tasks[0].begin, end = tasks[0].end, state_size = w.K * w.V;
  float* memory = thread_scratch(Chunk::floats(w.K) + heads * state_size + PanelWork::tiles());
  const Chunk c(memory, w.K);
  float* states = memory + Chunk::floats(w.K);
  float* tiles = states + heads * state_size;
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t x = 0; x < w.V; x += kPanel)
      begin_panel(p, w, tasks[h], x, states + h * state_size + x * w.K);
  }
  for (int64_t t = begin; t < end; t += kC) {
    for (int64_t h = 0; h < heads; ++h) {
      prepare_chunk</*kGrads=*/false>(p.in, w, c, ChunkGrads{}, t, std::min<int64_t>(kC, end - t),
                                      tasks[h].h);
      for (int64_t x = 0; x < w.V; x += kPanel) {
        run_panel(p, w, tasks[h], c, t, x, {states + h * state_size + x * w.K, tiles});
      }
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    float* final_state = state_of(p.final_state, p, tasks[h].n, tasks[h].h);
    for (int64_t x = 0; x < w.V; x += kPanel) {
      store_state(final_state, states + h * state_size + x * w.K, w, x);
    }
  }
}

// All tasks in step, a group of chunks at a time: first every chunk of the group on its own, then every panel
// of every task through the group. For fewer tasks than threads.
void run_split(const KdaForward& p, const Widths& w, const std::vector<Task>& tasks) {
  const int64_t count = static_cast<int64_t>(tasks.size()), panels = w.V / kPanel;
  const int64_t group = std::clamp<int64_t>(128 / count, 8, 64), chunk_floats = Chunk::floats(w.K);
  const std::unique_ptr<float[], decltype(&std::free)> memory(
      static_cast<float*>(std::aligned_alloc(
          64, sizeof(float) * round_up(count * (group * chunk_floats + w.K * w.V), kPanel))),
      &std::free);
  if (!memory) throw std::bad_alloc();
  float* states = memory.get() + count * group * chunk_floats;
  const auto chunk = [&](int64_t task, int64_t i) {
    return Chunk(memory.get() + (task * group + i) * chunk_floats, w.K);
  };
  const auto for_panels = [&](const auto& fn) {
    parallel_for(0, count * panels, 1, [&](int64_t from, int64_t to) {
      const FlushDenormals flush;
      for (int64_t i = from; i < to; ++i) {
        const int64_t task = i / panels, x = i % panels * kPanel;
        fn(task, x, states + task * w.K * w.V + x * w.K);
      }
    });
  };
  for_panels([&](int64_t task, int64_t x, float* S) { begin_panel(p, w, tasks[task], x, S); });
  for (int64_t done = 0; done < tasks[0].tokens(); done += group * kC) {
    parallel_for(0, count * group, 1, [&](int64_t from, int64_t to) {
      const FlushDenormals flush;
      for (int64_t i = from; i < to; ++i) {
        const Task& task = tasks[i / group];
        const int64_t t = task.begin + done + i % group * kC;
        if (t >= task.end) continue;
        prepare_chunk</*kGrads=*/false>(p.in, w, chunk(i / group, i % group), ChunkGrads{}, t,
                                        std::min<int64_t>(kC, task.end - t), task.h);
      }
    });
    for_panels([&](int64_t task, int64_t x, float* S) {
      const PanelWork work(S, thread_scratch(PanelWork::tiles()));
      const int64_t first = tasks[task].begin + done;
      for (int64_t i = 0; i < group && first + i * kC < tasks[task].end; ++i) {
        run_panel(p, w, tasks[task], chunk(task, i), first + i * kC, x, work);
      }
    });
  }
  for_panels([&](int64_t task, int64_t x, float* S) {
    store_state(state_of(p.final_state, p, tasks[task].n, tasks[task].h), S, w, x);
  });
}

// Whether whole tasks, longest first, would leave threads idle for more than a fifth of the time.
bool unbalanced(const std::vector<Task>& tasks, int threads) {
  const int64_t longest = tasks[0].tokens();
  if (threads == 1 || longest <= 4 * kC || tasks.size() > 8 * static_cast<size_t>(threads)) return false;
  std::vector<int64_t> load(static_cast<size_t>(threads));
  int64_t total = 0;
  for (const Task& task : tasks) {
    *std::min_element(load.begin(), load.end()) += task.tokens();
    total += task.tokens();
  }
  return *std::max_element(load.begin(), load.end()) * threads * 5 > total * 6;
}

}  // namespace

// Both ways give the same bits: an element's arithmetic does not depend on who does it.
void kda_chunk_forward(const KdaForward& p) {
  const Widths w(p.in);
  const std::vector<Task> tasks = list_tasks(p);
  if (tasks.empty()) return;
  const int threads = num_threads();
  if (unbalanced(tasks, threads)) return run_split(p, w, tasks);
  const int64_t heads = heads_together(p.in.heads, static_cast<int64_t>(tasks.size()), threads);
  const int64_t count = static_cast<int64_t>(tasks.size()) / heads;
  std::atomic<int64_t> next{0};
  parallel_for(0, std::min<int64_t>(count, threads), 1, [&](int64_t, int64_t) {
    const FlushDenormals flush;
    for (int64_t i = next++; i < count; i = next++) {
      run_tasks(p, w, tasks.data() + i * heads, heads);
    }
  });
}

}  // namespace godwit::kernels::GODWIT_ISA
