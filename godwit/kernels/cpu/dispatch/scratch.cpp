#include "godwit/kernels/cpu/dispatch/scratch.h"

#include <cstdlib>
#include <memory>
#include <new>

namespace godwit::kernels {

float* thread_scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local int64_t capacity = 0;
  if (floats > capacity) {
    const int64_t rounded = (floats + 1023) / 1024 * 1024;
    memory.reset();
    capacity = 0;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(rounded) * sizeof(float))));
    if (!memory) throw std::bad_alloc();
    capacity = rounded;
  }
  return memory.get();
}

}  // namespace godwit::kernels
