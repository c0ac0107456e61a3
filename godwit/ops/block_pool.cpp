#include "godwit/ops/block_pool.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <list>
#include <map>
#include <mutex>
#include <new>

#include "godwit/base/check.h"

namespace godwit::ops {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = 2 << 20;

struct Block {
  void* data;
  size_t size;
};

class BlockPool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < static_cast<size_t>(kPooledBytes)) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    auto block = std::make_unique<Block>(Block{.data = nullptr, .size = size});
    {
      const std::lock_guard lock(mutex_);
      if (!reuse(size, *block)) take(size, *block);
      use_.live += static_cast<int64_t>(block->size);
    }
    void* data = block->data;
    return {data, block.release(), &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  BlockPoolUse use() {
    const std::lock_guard lock(mutex_);
    return use_;
  }

  static BlockPool& instance() {
    static auto* const pool = new BlockPool;  // tensors may outlive every other static object
    return *pool;
  }

 private:
  using Kept = std::list<Block>;  // the oldest first

  static void give_back(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    BlockPool& pool = instance();
    const std::lock_guard lock(pool.mutex_);
    pool.use_.live -= static_cast<int64_t>(block->size);
    pool.use_.kept += static_cast<int64_t>(block->size);
    const auto at = pool.kept_.insert(pool.kept_.end(), *block);
    pool.by_size_.emplace(block->size, at);
  }

  // The smallest of the kept blocks that is large enough and not much larger.
  bool reuse(size_t size, Block& block) {
    const auto found = by_size_.lower_bound(size);
    if (found == by_size_.end() || found->first - size > found->first / 16) return false;
    block = *found->second;
    kept_.erase(found->second);
    by_size_.erase(found);
    use_.kept -= static_cast<int64_t>(block.size);
    ++use_.reused;
    return true;
  }

  void take(size_t size, Block& block) {
    for (size_t freed = 0; freed < size && !kept_.empty();) freed += release_oldest();
    void* data = map(size);
    if (data == MAP_FAILED) {  // the rest of what is kept may stand in the way
      while (!kept_.empty()) release_oldest();
      data = map(size);
    }
    check(data != MAP_FAILED, "out of memory: {} bytes for a tensor", size);
    if (size >= kHugePage) ::madvise(data, size, MADV_HUGEPAGE);  // a wish: fewer faults where it is granted
    block.data = data;
    ++use_.taken;
  }

  static void* map(size_t size) {
    return ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  }

  size_t release_oldest() {
    const Block block = kept_.front();
    auto [at, end] = by_size_.equal_range(block.size);
    while (at != end && at->second != kept_.begin()) ++at;
    by_size_.erase(at);
    kept_.pop_front();
    use_.kept -= static_cast<int64_t>(block.size);
    ::munmap(block.data, block.size);
    return block.size;
  }

  std::mutex mutex_;
  Kept kept_;
  std::multimap<size_t, Kept::iterator> by_size_;
  BlockPoolUse use_;
};

}  // namespace

void use_block_pool() {
  c10::SetCPUAllocator(&BlockPool::instance());
}

BlockPoolUse block_pool_use() {
  return BlockPool::instance().use();
}

c10::Allocator& block_pool() {
  return BlockPool::instance();
}

}  // namespace godwit::ops
