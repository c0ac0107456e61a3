// Joins the kernels' parallel_for to ATen's pool when the op library is loaded. Each op's schema and kernels
// are registered in its own file with TORCH_LIBRARY_FRAGMENT(godwit, m).
#include <ATen/Parallel.h>

#include "godwit/base/parallel.h"

#ifndef _OPENMP
#error "compile this file with OpenMP: at::parallel_for would run on one thread"
#endif

namespace {

void run_aten(int64_t begin, int64_t end, int64_t grain, const godwit::RangeFn& fn) {
  at::parallel_for(begin, end, grain, [&](int64_t from, int64_t to) { fn(from, to); });
}

[[maybe_unused]] const bool g_joined = [] {
  godwit::set_parallel_hooks({.run = run_aten,
                              .num_threads = [] { return at::get_num_threads(); },
                              .set_num_threads = [](int n) { at::set_num_threads(n); }});
  return true;
}();

}  // namespace
