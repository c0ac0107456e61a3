#include "godwit/kernels/cpu/dispatch/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace godwit::kernels {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Block = std::unique_ptr<float, Free>;

// Large blocks ask for huge pages: rows are written in random order, which with 4 KiB pages misses the TLB at
// every row.
Block allocate(size_t bytes) {
  const bool large = bytes >= 2 * kHugePage;
  const size_t alignment = large ? kHugePage : kAlignment;
  auto* p =
      static_cast<float*>(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment));
  if (p == nullptr) throw std::bad_alloc();
  if (large) madvise(p, bytes, MADV_HUGEPAGE);  // a hint: refused where there are none
  return Block(p);
}

size_t rounded_bytes(int64_t floats) {
  const size_t bytes = static_cast<size_t>(floats) * sizeof(float);
  return (bytes + kAlignment) / kAlignment * kAlignment;
}

// Blocks not in use. As many as there were calls at one time, each as large as the largest it served.
struct Pool {
  std::mutex mutex;
  std::vector<std::pair<size_t, Block>> blocks;
};
Pool& pool() {
  static Pool instance;
  return instance;
}

}  // namespace

float* thread_scratch(int64_t floats) {
  thread_local Block block;
  thread_local size_t size = 0;
  const size_t bytes = rounded_bytes(floats);
  if (bytes > size) {
    block.reset();
    block = allocate(bytes);
    size = bytes;
  }
  return block.get();
}

Scratch::Scratch(int64_t floats) : bytes_(rounded_bytes(floats)) {
  Block block;
  {
    const std::lock_guard lock(pool().mutex);
    auto& blocks = pool().blocks;
    if (!blocks.empty()) {
      auto largest = blocks.begin();
      for (auto it = blocks.begin(); it != blocks.end(); ++it) {
        if (it->first > largest->first) largest = it;
      }
      if (largest->first >= bytes_) {
        bytes_ = largest->first;
        block = std::move(largest->second);
      }
      blocks.erase(largest);  // too small: replaced by the new, larger one
    }
  }
  if (!block) block = allocate(bytes_);
  data_ = block.release();
}

Scratch::~Scratch() {
  const std::lock_guard lock(pool().mutex);
  pool().blocks.emplace_back(bytes_, Block(data_));
}

}  // namespace godwit::kernels
