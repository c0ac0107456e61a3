// Absorbed multi-head latent attention over paged latents in plain ATen: the op's path where no kernel is
// linked in, and in fp64 the tests' oracle. Arguments as in ops.h. Sums in fp64 if q is fp64, else in fp32.
#pragma once

#include <ATen/core/Tensor.h>

namespace godwit::ops {

struct MlaDecodeArgs {
  at::Tensor q, pages, table, lengths;
  int64_t rank = 0;
  double scale = 0;
  int64_t window = 0;
};

namespace ref {

at::Tensor mla_decode(const MlaDecodeArgs& args);

}  // namespace ref
}  // namespace godwit::ops
