// Cross-entropy of rows of logits [rows, V] with integer targets, in place: nll = log sum exp(x) - x_target
// and, if wanted, the logits become their gradient weight (softmax(x) - one-hot). A target below 0 is
// ignored: nll 0, gradient 0.
#pragma once

#include <cstdint>

namespace godwit::kernels {

struct SoftmaxLoss {
  int64_t vocabulary = 0;
  float* logits = nullptr;
  const int64_t* targets = nullptr;
  const float* weights = nullptr;
  float* nll = nullptr;
  bool gradient = false;
};
void softmax_loss(int64_t rows, const SoftmaxLoss& args);

}  // namespace godwit::kernels
