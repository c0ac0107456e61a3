// Times attention on the CPU, forward and forward + backward, beside at::scaled_dot_product_attention on the
// same inputs in the same process (values padded to the keys' width for it, as its flash kernel wants).
// Prints a table in Markdown.
//   attention_cpu_bench [repeats] [heads] [longest]
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "bench/timing.h"
#include "godwit/ops/ops.h"

namespace {

using at::Tensor;
using godwit::bench::Time;

constexpr int64_t kKey = 192, kValue = 128;

struct Case {
  int64_t tokens;
  int64_t sequences;
  int64_t heads;
};

Tensor by_sdpa(const Case& c, const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  const Tensor values = at::constant_pad_nd(v, {0, kKey - kValue});
  std::vector<Tensor> out;
  for (int64_t n = 0; n < c.sequences; ++n) {
    const auto heads_first = [&](const Tensor& x) {
      return x.narrow(0, n * c.tokens, c.tokens).transpose(0, 1).unsqueeze(0);
    };
    out.push_back(at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(values), {},
                                                   /*dropout_p=*/0.0, /*is_causal=*/true, scale)
                      .squeeze(0)
                      .narrow(2, 0, kValue)
                      .transpose(0, 1));
  }
  return at::cat(out);
}

// The best of the repeats of both, taken in turn, so that a busy machine disturbs both alike.
template <class A, class B>
std::pair<Time, Time> in_turn(int repeats, const A& a, const B& b) {
  std::pair<Time, Time> best;
  const auto keep = [](Time& to, const Time& t) {
    to.wall_ms = std::min(to.wall_ms, t.wall_ms);
    to.cpu_ms = std::min(to.cpu_ms, t.cpu_ms);
  };
  for (int i = 0; i < repeats; ++i) {
    keep(best.first, godwit::bench::best_of(1, a));
    keep(best.second, godwit::bench::best_of(1, b));
  }
  return best;
}

void line(const Case& c, const char* what, const std::pair<Time, Time>& t, double flops) {
  fmt::print("| {} x {}, {} | {} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.2f} | {:.0f} |\n", c.tokens,
             c.sequences, c.heads, what, t.first.wall_ms, t.second.wall_ms,
             t.second.wall_ms / t.first.wall_ms, t.first.cpu_ms, t.second.cpu_ms,
             flops / t.first.cpu_ms / 1e6);
  std::fflush(stdout);
}

void run(const Case& c, int repeats) {
  at::manual_seed(1);
  const int64_t all = c.tokens * c.sequences;
  std::vector<Tensor> x = {at::randn({all, c.heads, kKey}), at::randn({all, c.heads, kKey}),
                           at::randn({all, c.heads, kValue})};
  const Tensor cu = at::arange(0, all + 1, c.tokens, at::kLong), grad = at::randn({all, c.heads, kValue});
  const double scale = 1 / std::sqrt(static_cast<double>(kKey));
  const auto ours = [&] { return godwit::ops::attention(x[0], x[1], x[2], cu, cu, scale, 0); };
  const auto theirs = [&] { return by_sdpa(c, x[0], x[1], x[2], scale); };
  const double pairs = 0.5 * static_cast<double>((c.tokens + 1) * c.tokens * c.sequences * c.heads);
  {
    const at::NoGradGuard no_grad;
    line(c, "forward", in_turn(repeats, ours, theirs), 2 * pairs * (kKey + kValue));
  }
  for (Tensor& t : x) t.set_requires_grad(true);
  const auto both = [&](const auto& op) { torch::autograd::grad({op()}, x, {grad}); };
  line(c, "forward + backward",
       in_turn(
           repeats, [&] { both(ours); }, [&] { both(theirs); }),
       2 * pairs * (4 * kKey + 3 * kValue));
}

}  // namespace

int main(int argc, char** argv) {
  const int repeats = argc > 1 ? std::atoi(argv[1]) : 7;
  const int64_t heads = argc > 2 ? std::atoi(argv[2]) : 2, longest = argc > 3 ? std::atoi(argv[3]) : 32768;
  fmt::print("{} threads, Dk {}, Dv {}, fp32, causal\n\n", at::get_num_threads(), kKey, kValue);
  fmt::print(
      "| tokens x sequences, heads | what | ours ms | ATen ms | times | ours CPU ms | ATen CPU ms | ours "
      "GFLOP/s a CPU second |\n|---|---|---|---|---|---|---|---|\n");
  for (const Case& c :
       {Case{256, 16, heads}, Case{2048, 1, heads}, Case{8192, 1, heads}, Case{32768, 1, heads}}) {
    if (c.tokens <= longest) run(c, c.tokens >= 32768 ? std::min(repeats, 2) : repeats);
  }
}
