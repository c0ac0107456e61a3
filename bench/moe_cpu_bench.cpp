// Times the ops of the MoE layer on the CPU beside their plain ATen compositions, at the `nano` model's
// sizes.
//   moe_cpu_bench [tokens] [latent width] [inner width]
#include <torch/torch.h>

#include <cstdlib>

#include "bench/timing.h"
#include "godwit/ops/ops.h"
#include "godwit/ops/ref/moe_experts_ref.h"

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
    if (s.tokens < 100000) {
      report(title("  ATen"),
             best_of(3, [&] { godwit::ops::ref::moe_experts(z, chosen, p, w1, w3, w2, kBetaGate, kBetaUp); }),
             3 * product);
    }
  }
  if (s.tokens < 256) return;
  std::vector<Tensor> leaves = {z, p, w1, w3, w2};
  for (Tensor& x : leaves) x = x.detach().clone().set_requires_grad(true);
  const Tensor d_out = at::randn_like(z);
  const auto step = [&](auto&& op) {
    const Tensor out = op(leaves[0], chosen, leaves[1], leaves[2], leaves[3], leaves[4], kBetaGate, kBetaUp);
    torch::autograd::grad({out}, leaves, {d_out});
  };
  report(title("experts forward + backward"), best_of(7, [&] { step(godwit::ops::moe_experts); }),
         9 * product);
  report(title("  ATen"), best_of(2, [&] { step(godwit::ops::ref::moe_experts); }), 9 * product);
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
  experts(s);
  for (const int64_t tokens : {1, 16}) experts({tokens, s.width, s.inner});
  return 0;
}
