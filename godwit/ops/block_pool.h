// Large CPU tensors without page faults. glibc takes blocks of 32 MiB and more from the system one by one and
// gives them back when they are freed, so that each is zeroed page by page again: at 32K tokens a quarter of
// a training step. And its heap keeps holes between smaller blocks that come and go. The pool keeps the pages
// of what is freed for the next tensor of any size.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace godwit::ops {

inline constexpr int64_t kPooledBytes = 4 << 20;  // smaller blocks are LibTorch's as before

// Tensors of the CPU allocated from now on come from the pool. For good; again is nothing.
void use_block_pool();

struct BlockPoolUse {
  int64_t live = 0;    // bytes in blocks that are in use
  int64_t kept = 0;    // bytes that wait
  int64_t taken = 0;   // bytes that came from the system, all in all
  int64_t joined = 0;  // blocks that were put together from several that waited
};
BlockPoolUse block_pool_use();

// The pool itself. A new block is the front of one that waits, if one is large enough; else the pages of
// several are moved together (mremap), and only what is still missing comes from the system. So what is held
// never exceeds the most that was in use at once.
c10::Allocator& block_pool();

}  // namespace godwit::ops
