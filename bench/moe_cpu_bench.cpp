// Times the ops of the MoE layer, AttnRes, dense products, loss and Muon on the CPU beside their plain ATen
// forms.
//   moe_cpu_bench [tokens] [latent width] [inner width]
#include <torch/torch.h>

#include <cstdlib>

#include "bench/timing.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/attn_res_mix_ref.h"
#include "godwit/ops/ref/moe_experts_ref.h"
#include "godwit/ops/ref/qb_histogram_ref.h"

namespace {

using at::Tensor;
using godwit::bench::best_of;
using godwit::bench::report;

constexpr int64_t kExperts = 896, kSlots = 16;
constexpr double kBetaGate = 4, kBetaUp = 25;

struct Sizes {
  int64_t tokens = 8192;
  int64_t width = 128;
  int64_t inner = 64;
};

// The yardstick: one large product.
void large_gemm() {
  const Tensor a = at::randn({2048, 2048}), b = at::randn({2048, 2048});
  report("at::mm 2048^3", best_of(5, [&] { at::mm(a, b); }), 2.0 * 2048 * 2048 * 2048);
}

// Forward and backward of sum(op(inputs) * d_out).
template <class Op>
void step(const Op& op, std::vector<Tensor>& leaves, const Tensor& d_out) {
  torch::autograd::grad({op()}, leaves, {d_out}, {}, false, true);
}

void experts(const Sizes& s) {
  const Tensor z = at::randn({s.tokens, s.width}), p = at::rand({s.tokens, kSlots}) / kSlots;
  const Tensor chosen = at::rand({s.tokens, kExperts})
                            .argsort(/*dim=*/-1, /*descending=*/false)
                            .narrow(1, 0, kSlots)
                            .to(at::kInt)
                            .contiguous();
  const Tensor w1 = at::randn({kExperts, s.inner, s.width}) * 0.1, w3 = at::randn_like(w1) * 0.1;
  const Tensor w2 = at::randn({kExperts, s.width, s.inner}) * 0.1;
  const double product = 2.0 * static_cast<double>(s.tokens * kSlots * s.width * s.inner);
  const auto title = [&](const char* what) {
    return fmt::format("{} T {} L {} I {}", what, s.tokens, s.width, s.inner);
  };
  {
    const at::NoGradGuard no_grad;
    report(title("experts forward"),
           best_of(7, [&] { godwit::ops::moe_experts(z, chosen, p, w1, w3, w2, kBetaGate, kBetaUp); }),
           3 * product);
    report(title("  ATen"),
           best_of(3, [&] { godwit::ops::ref::moe_experts(z, chosen, p, w1, w3, w2, kBetaGate, kBetaUp); }),
           3 * product);
  }
  if (s.tokens < 256) return;
  std::vector<Tensor> leaves = {z, p, w1, w3, w2};
  for (Tensor& x : leaves) x = x.detach().clone().set_requires_grad(true);
  const Tensor d_out = at::randn_like(z);
  const auto both = [&](auto&& op) {
    step(
        [&] { return op(leaves[0], chosen, leaves[1], leaves[2], leaves[3], leaves[4], kBetaGate, kBetaUp); },
        leaves, d_out);
  };
  report(title("experts forward + backward"), best_of(7, [&] { both(godwit::ops::moe_experts); }),
         9 * product);
  report(title("  ATen"), best_of(2, [&] { both(godwit::ops::ref::moe_experts); }), 9 * product);
}

void router(const Sizes& s) {
  const at::NoGradGuard no_grad;
  const Tensor logits = at::randn({s.tokens, kExperts}), bias = at::randn({kExperts}) * 0.1;
  report("router 16 of 896",
         best_of(7, [&] { godwit::ops::moe_router(logits, bias, kSlots, true, 1, 1, 1); }));
  report("  ATen: sigmoid, topk of 17, gather", best_of(3, [&] {
           const Tensor scores = at::sigmoid(logits);
           const auto top = at::topk(scores + bias, kSlots + 1, -1, true, true);
           const Tensor p = scores.gather(1, std::get<1>(top).narrow(1, 0, kSlots));
           return p / p.sum(1, true);
         }));
  const auto [weights, experts, scores, cutoff] =
      godwit::ops::moe_router(logits, bias, kSlots, true, 1, 1, 1);
  Tensor counts = at::zeros({kExperts, 1000}, at::kLong);
  report("QB histogram, 1000 bins",
         best_of(7, [&] { godwit::ops::qb_histogram(scores, cutoff, -1.2, 1.2, counts); }));
  report("  ATen: bincount",
         best_of(3, [&] { godwit::ops::ref::qb_histogram(scores, cutoff, -1.2, 1.2, counts); }));
}

void mix(const Sizes& s) {
  constexpr int64_t kWidth = 256;
  for (const int64_t count : {2, 5, 9}) {
    std::vector<Tensor> leaves;
    for (int64_t i = 0; i < count; ++i) leaves.push_back(at::randn({s.tokens, kWidth}));
    leaves.push_back(at::ones({kWidth}));
    leaves.push_back(at::randn({kWidth}) * 0.1);
    for (Tensor& x : leaves) x.set_requires_grad(true);
    const std::vector<Tensor> v(leaves.begin(), leaves.end() - 2);
    const Tensor &weight = leaves[count], &query = leaves[count + 1], d_out = at::randn({s.tokens, kWidth});
    report(fmt::format("AttnRes mix of {}, forward + backward", count), best_of(5, [&] {
             step([&] { return godwit::ops::attn_res_mix(v, weight, query, 1e-5); }, leaves, d_out);
           }));
    report("  ATen", best_of(3, [&] {
             step([&] { return godwit::ops::ref::attn_res_mix(v, weight, query, 1e-5); }, leaves, d_out);
           }));
  }
}

void dense(const Sizes& s) {
  constexpr int64_t kWidth = 256;
  for (const int64_t rows : {int64_t{1}, int64_t{16}, s.tokens}) {
    for (const int64_t outputs : {256, 896, 4352}) {
      std::vector<Tensor> leaves = {at::randn({rows, kWidth}).set_requires_grad(true),
                                    at::randn({outputs, kWidth}).set_requires_grad(true)};
      const double product = 2.0 * static_cast<double>(rows * outputs * kWidth);
      const auto forward = [&](auto&& op) {
        const at::NoGradGuard no_grad;
        op(leaves[0], leaves[1]);
      };
      const int repeats = rows < 100 ? 200 : 5;
      const auto title = fmt::format("linear {} x {} x {}", rows, kWidth, outputs);
      const auto ours = [](const Tensor& x, const Tensor& w) { return godwit::ops::linear(x, w); };
      const auto theirs = [](const Tensor& x, const Tensor& w) { return at::linear(x, w); };
      report(title, best_of(repeats, [&] { forward(ours); }), product);
      report("  at::linear", best_of(repeats, [&] { forward(theirs); }), product);
      if (rows < 100) continue;
      const Tensor d_out = at::randn({rows, outputs});
      report(title + " + backward",
             best_of(5, [&] { step([&] { return ours(leaves[0], leaves[1]); }, leaves, d_out); }),
             3 * product);
      report("  at::linear",
             best_of(5, [&] { step([&] { return theirs(leaves[0], leaves[1]); }, leaves, d_out); }),
             3 * product);
    }
  }
}

void cross_entropy(const Sizes& s) {
  constexpr int64_t kWidth = 256, kVocabulary = 4352;
  std::vector<Tensor> leaves = {at::randn({s.tokens, kWidth}).set_requires_grad(true),
                                (at::randn({kVocabulary, kWidth}) * 0.02).set_requires_grad(true)};
  const Tensor targets = at::randint(kVocabulary, {s.tokens}, at::kLong), weights = at::ones({s.tokens});
  const double flops = 6.0 * static_cast<double>(s.tokens * kWidth * kVocabulary);
  const Tensor one = at::ones({});
  report("cross-entropy, V 4352, forward + backward",
         best_of(3,
                 [&] {
                   step(
                       [&] {
                         return std::get<0>(
                             godwit::ops::linear_cross_entropy(leaves[0], leaves[1], targets, weights));
                       },
                       leaves, one);
                 }),
         flops);
  report("  ATen: all logits",
         best_of(2,
                 [&] {
                   step(
                       [&] {
                         return at::cross_entropy_loss(at::linear(leaves[0], leaves[1]), targets, {},
                                                       at::Reduction::Sum);
                       },
                       leaves, one);
                 }),
         flops);
}

void newton_schulz(const Sizes& s) {
  const Tensor start = at::randn({kExperts, s.inner, s.width});
  const auto small = static_cast<double>(std::min(s.inner, s.width)),
             large = static_cast<double>(std::max(s.inner, s.width));
  const double flops =
      5 * static_cast<double>(kExperts) * (4 * small * small * large + 2 * small * small * small);
  report(fmt::format("Newton-Schulz, 896 of {} x {}", s.inner, s.width),
         best_of(5,
                 [&] {
                   Tensor x = start.clone();
                   godwit::ops::newton_schulz_(x, 5);
                 }),
         flops);
  report("  ATen: bmm",
         best_of(3,
                 [&] {
                   Tensor x = start / (at::linalg_vector_norm(start, 2, {1, 2}, true) + 1e-7);
                   for (int i = 0; i < 5; ++i) {
                     const Tensor gram = at::bmm(x, x.mT());
                     x = at::baddbmm(x, at::baddbmm(gram, gram, gram, -4.7750, 2.0315), x, 3.4445, 1);
                   }
                 }),
         flops);
}

}  // namespace

int main(int argc, char** argv) {
  Sizes s;
  if (argc > 1) s.tokens = std::atoll(argv[1]);
  if (argc > 2) s.width = std::atoll(argv[2]);
  if (argc > 3) s.inner = std::atoll(argv[3]);
  at::manual_seed(1);
  fmt::print("threads {}\n", at::get_num_threads());
  large_gemm();
  router(s);
  mix(s);
  dense(s);
  cross_entropy(s);
  newton_schulz(s);
  experts(s);
  for (const int64_t tokens : {1, 16}) experts({tokens, s.width, s.inner});
  return 0;
}
