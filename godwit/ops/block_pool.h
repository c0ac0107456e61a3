// Large CPU tensors without page faults. glibc takes blocks of 32 MiB and more from the system one by one and
// gives them back when they are freed, so that each is zeroed page by page again: at 32K tokens a quarter of
// a training step. The pool keeps freed blocks for the next tensor of about that size.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace godwit::ops {

inline constexpr int64_t kPooledBytes = 1 << 20;  // smaller blocks are LibTorch's as before

// Tensors of the CPU allocated from now on come from the pool. For good; again is nothing.
void use_block_pool();

struct BlockPoolUse {
  int64_t live = 0;    // bytes in blocks that are in use
  int64_t kept = 0;    // bytes in blocks that wait
  int64_t taken = 0;   // blocks that came from the system
  int64_t reused = 0;  // blocks that came from those kept
};
BlockPoolUse block_pool_use();

// The pool itself. A block is reused for sizes down to 15/16 of its own. What is taken from the system never
// exceeds the most that was in use at once: before a new block is taken, as many bytes of those kept go back,
// the oldest first.
c10::Allocator& block_pool();

}  // namespace godwit::ops
