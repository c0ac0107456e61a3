#include "godwit/ops/block_pool.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "godwit/base/check.h"

namespace godwit::ops {
namespace {

constexpr size_t kGrain = 2 << 20;  // of sizes and addresses

struct Piece {  // of one mapping: mremap moves no more at a time
  char* data;
  size_t size;
};

struct Block {
  char* data = nullptr;
  size_t size = 0;
  std::vector<Piece> pieces = {};  // one after another

  void add(Piece piece) {
    pieces.push_back(piece);
    size += piece.size;
  }
  // Cuts off the first `front` bytes.
  Block cut(size_t front) {
    Block out{.data = data};
    while (out.size < front) {
      Piece& piece = pieces.front();
      const size_t part = std::min(piece.size, front - out.size);
      out.add({piece.data, part});
      piece = {piece.data + part, piece.size - part};
      if (piece.size == 0) pieces.erase(pieces.begin());
    }
    data += front;
    size -= front;
    return out;
  }
};

void* map(void* at, size_t size, int protection, int flags) {
  return ::mmap(at, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

// Addresses without memory, aligned to kGrain; null if there are none.
char* reserve(size_t size) {
  void* found = map(nullptr, size + kGrain, PROT_NONE, MAP_NORESERVE);
  if (found == MAP_FAILED) return nullptr;
  auto* begin = static_cast<char*>(found);
  char* data = begin + (kGrain - reinterpret_cast<uintptr_t>(begin) % kGrain) % kGrain;
  if (data > begin) ::munmap(begin, static_cast<size_t>(data - begin));
  ::munmap(data + size, static_cast<size_t>(begin + kGrain - data));
  return data;
}

class BlockPool final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < static_cast<size_t>(kPooledBytes)) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    check(bytes < size_t{1} << 56, "out of memory: {} bytes for a tensor", bytes);
    const size_t size = (bytes + kGrain - 1) / kGrain * kGrain;
    const std::lock_guard lock(mutex_);
    Block block = find(size);
    void* data = block.data;
    live_.emplace(data, std::move(block));
    use_.live += static_cast<int64_t>(size);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  // Frees by the address alone, as oneDNN does with its buffers of any size: data are their own context.
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

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
  static void give_back(void* data) {
    BlockPool& pool = instance();
    std::unique_lock lock(pool.mutex_);
    const auto at = pool.live_.find(data);
    if (at == pool.live_.end()) {  // a small one
      lock.unlock();
      c10::GetDefaultCPUAllocator()->raw_deallocate(data);
      return;
    }
    Block block = std::move(at->second);
    pool.live_.erase(at);
    pool.use_.live -= static_cast<int64_t>(block.size);
    pool.keep(std::move(block));
  }

  void keep(Block block) {
    use_.kept += static_cast<int64_t>(block.size);
    kept_.emplace(block.size, std::move(block));
  }

  Block pop(std::multimap<size_t, Block>::iterator at) {
    Block block = std::move(at->second);
    kept_.erase(at);
    use_.kept -= static_cast<int64_t>(block.size);
    return block;
  }

  Block find(size_t size) {
    const auto fits = kept_.lower_bound(size);
    if (fits != kept_.end()) {
      Block block = pop(fits);
      if (block.size == size) return block;
      Block front = block.cut(size);
      keep(std::move(block));
      return front;
    }
    Block block{.data = reserve(size)};
    if (block.data != nullptr && fill(block, size)) return block;
    // Too many mappings, or no memory: everything goes back, and one block comes from the system.
    if (block.data != nullptr) ::munmap(block.data, size);
    while (!kept_.empty()) {
      const Block old = pop(kept_.begin());
      ::munmap(old.data, old.size);
    }
    block = {.data = reserve(size)};
    check(block.data != nullptr && take(block, size), "out of memory: {} bytes for a tensor", size);
    return block;
  }

  // Moves what waits, the largest first, to the block's addresses, and takes the rest from the system.
  bool fill(Block& block, size_t size) {
    use_.joined += kept_.empty() ? 0 : 1;
    while (block.size < size && !kept_.empty()) {
      Block front = pop(std::prev(kept_.end()));
      if (const size_t missing = size - block.size; front.size > missing) {
        Block rest = std::move(front);
        front = rest.cut(missing);
        keep(std::move(rest));
      }
      for (size_t i = 0; i < front.pieces.size(); ++i) {
        const Piece& piece = front.pieces[i];
        char* to = block.data + block.size;
        if (::mremap(piece.data, piece.size, piece.size, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) {
          for (; i < front.pieces.size(); ++i) ::munmap(front.pieces[i].data, front.pieces[i].size);
          return false;
        }
        block.add({to, piece.size});
      }
    }
    return block.size == size || take(block, size);
  }

  bool take(Block& block, size_t size) {
    char* to = block.data + block.size;
    const size_t missing = size - block.size;
    if (map(to, missing, PROT_READ | PROT_WRITE, MAP_FIXED) == MAP_FAILED) return false;
    use_.taken += static_cast<int64_t>(missing);
    block.add({to, missing});
    return true;
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block> live_;  // by their data
  std::multimap<size_t, Block> kept_;
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
