// Working memory of a kernel on one thread.
#pragma once

#include <cstdint>

namespace godwit::kernels {

// At least `floats` floats, 64-byte aligned, uninitialised, valid until the next call on this thread. The
// memory is kept for later calls and freed with the thread.
float* thread_scratch(int64_t floats);

}  // namespace godwit::kernels
