#include "godwit/text/bpe.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <queue>

#include "godwit/base/check.h"
#include "godwit/text/pretokenize.h"

namespace godwit {
namespace {

static_assert(std::endian::native == std::endian::little, "Key loads bytes as little-endian words");

constexpr size_t kShort = 15;       // bytes in a Key
constexpr size_t kShortPiece = 48;  // below this a scan for the minimum beats a heap
constexpr size_t kBatch = 64;       // pieces whose table slots are fetched from memory together

uint64_t mask_low(size_t bytes) {
  return bytes >= 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * bytes)) - 1;
}

inline Key load_key(std::string_view bytes, const char* end) {
  const size_t length = bytes.size();
  Key key{0, 0};
  if (end - bytes.data() >= 16) [[likely]] {
    std::memcpy(&key, bytes.data(), 16);
    key.low &= mask_low(length);
    key.high &= length > 8 ? mask_low(length - 8) : 0;
  } else {
    std::memcpy(&key, bytes.data(), length);
  }
  key.high |= uint64_t{length} << 56;
  return key;
}

inline uint64_t hash_key(Key key) {
  const auto product =
      static_cast<unsigned __int128>(key.low ^ 0x9e3779b97f4a7c15ULL) * (key.high ^ 0xbf58476d1ce4e5b9ULL);
  const uint64_t mixed = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  return mixed ^ mixed >> 29;
}

uint64_t hash_bytes(std::string_view bytes) {
  uint64_t hash = bytes.size();
  for (; bytes.size() >= 16; bytes.remove_prefix(16)) {
    Key key;
    std::memcpy(&key, bytes.data(), 16);
    hash = hash_key({key.low ^ hash, key.high});
  }
  const Key key = load_key(bytes, bytes.data() + bytes.size());
  return hash_key({key.low ^ hash, key.high});
}

}  // namespace

RankTable::RankTable(const std::vector<std::string>& tokens) {
  size_t longs = 0;
  for (const std::string& token : tokens) {
    longs += token.size() > kShort;
    longest_ = std::max(longest_, token.size());
  }
  const auto slots = [](size_t entries) {
    return std::bit_ceil(entries + entries / 3 + 1);
  };  // at most 3/4 full
  short_.resize(slots(tokens.size() - longs));
  long_.resize(slots(longs));
  long_tokens_.resize(longs > 0 ? tokens.size() : 0);
  for (size_t rank = 0; rank < tokens.size(); ++rank) insert(tokens[rank], static_cast<uint32_t>(rank));
}

void RankTable::insert(std::string_view bytes, uint32_t rank) {
  if (bytes.size() <= kShort) {
    const Key key = load_key(bytes, bytes.data() + bytes.size());
    size_t slot = hash_key(key) & (short_.size() - 1);
    while (short_[slot].rank != kNone) slot = (slot + 1) & (short_.size() - 1);
    short_[slot] = {key, rank};
  } else {
    const uint64_t hash = hash_bytes(bytes);
    size_t slot = hash & (long_.size() - 1);
    while (long_[slot].rank != kNone) slot = (slot + 1) & (long_.size() - 1);
    long_[slot] = {static_cast<uint32_t>(hash >> 32), rank};
    long_tokens_[rank] = bytes;
  }
}

inline uint32_t RankTable::find_short(Key key, uint64_t hash) const {
  size_t slot = hash & (short_.size() - 1);
  while (short_[slot].key != key) {
    if (short_[slot].rank == kNone) return kNone;
    slot = (slot + 1) & (short_.size() - 1);
  }
  return short_[slot].rank;
}

uint32_t RankTable::find_long(std::string_view bytes) const {
  if (bytes.size() > longest_) return kNone;
  const uint64_t hash = hash_bytes(bytes);
  size_t slot = hash & (long_.size() - 1);
  for (; long_[slot].rank != kNone; slot = (slot + 1) & (long_.size() - 1)) {
    const LongSlot& s = long_[slot];
    if (s.hash == static_cast<uint32_t>(hash >> 32) && long_tokens_[s.rank] == bytes) return s.rank;
  }
  return kNone;
}

inline uint32_t RankTable::find(std::string_view bytes, const char* end) const {
  if (bytes.size() > kShort) return find_long(bytes);
  const Key key = load_key(bytes, end);
  return find_short(key, hash_key(key));
}

namespace {

// Pieces merged lately and their ids: what is no token of its own repeats itself too. Direct-mapped, an entry
// a cache line.
class MergeMemory {
 public:
  static constexpr size_t kMostIds = 9;
  struct alignas(64) Entry {
    Key key{0, 0};
    uint64_t owner = 0;  // 0: empty
    int32_t count = 0;
    int32_t ids[kMostIds];
  };
  Entry& at(uint64_t hash) { return entries_[hash % kEntries]; }

  static MergeMemory& of_this_thread() {
    static thread_local const auto memory = std::make_unique<MergeMemory>();
    return *memory;
  }

 private:
  static constexpr size_t kEntries = 8192;  // 512 KB: about a core's second-level cache
  std::array<Entry, kEntries> entries_;
};

uint64_t next_owner() {
  static std::atomic<uint64_t> owners{0};
  return ++owners;
}

}  // namespace

Bpe::Bpe(const std::vector<std::string>& tokens) : ranks_(tokens), owner_(next_owner()) {}

void Bpe::encode_piece(std::string_view piece, const char* end, std::vector<int32_t>& ids) const {
  const uint32_t rank = ranks_.find(piece, end);
  if (rank != RankTable::kNone) {
    ids.push_back(static_cast<int32_t>(rank));
  } else {
    merge_piece(piece, end, ids);
  }
}

void Bpe::merge_piece(std::string_view piece, const char* end, std::vector<int32_t>& ids) const {
  if (piece.size() < kShortPiece) {
    merge_short(piece, end, ids);
  } else {
    merge_long(piece, end, ids);
  }
}

// starts[i] is where part i begins, joined[i] the rank of parts i and i+1 as one. One merge removes one part.
void Bpe::merge_short(std::string_view piece, const char* end, std::vector<int32_t>& ids) const {
  std::array<uint8_t, kShortPiece + 1> starts;
  std::array<uint32_t, kShortPiece> joined;
  size_t parts = piece.size();
  for (size_t i = 0; i <= parts; ++i) starts[i] = static_cast<uint8_t>(i);
  const auto rank_of = [&](size_t i) {  // of parts i and i+1
    return i + 1 < parts ? ranks_.find(piece.substr(starts[i], starts[i + 2] - starts[i]), end)
                         : RankTable::kNone;
  };
  for (size_t i = 0; i < parts; ++i) joined[i] = rank_of(i);
  while (true) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < parts; ++i) {
      if (joined[i] < joined[best]) best = i;
    }
    if (joined[best] == RankTable::kNone) break;
    std::copy(starts.begin() + best + 2, starts.begin() + parts + 1, starts.begin() + best + 1);
    std::copy(joined.begin() + best + 2, joined.begin() + parts, joined.begin() + best + 1);
    --parts;
    joined[best] = rank_of(best);
    if (best > 0) joined[best - 1] = rank_of(best - 1);
  }
  for (size_t i = 0; i < parts; ++i) {
    ids.push_back(static_cast<int32_t>(ranks_.find(piece.substr(starts[i], starts[i + 1] - starts[i]), end)));
  }
}

// O(n log n): a heap of candidate merges over a linked list of parts. A candidate that no longer holds is
// dropped when it comes up: its part then has another joined rank.
void Bpe::merge_long(std::string_view piece, const char* end, std::vector<int32_t>& ids) const {
  check(piece.size() < (uint64_t{1} << 32), "tokenizer: one piece of {} bytes, at most 4 GiB can be encoded",
        piece.size());
  struct Part {
    uint32_t begin_of_previous;
    uint32_t end;
    uint32_t joined;  // rank of this part and the next as one; kNone when there is none or the part is gone
  };
  const auto n = static_cast<uint32_t>(piece.size());
  std::vector<Part> parts(n);  // indexed by the byte a part begins at
  std::vector<uint64_t> heap;  // rank << 32 | begin
  heap.reserve(n);
  const auto rank_of = [&](uint32_t begin) {
    const uint32_t middle = parts[begin].end;
    return middle < n ? ranks_.find(piece.substr(begin, parts[middle].end - begin), end) : RankTable::kNone;
  };
  for (uint32_t i = 0; i < n; ++i) parts[i] = {i - 1, i + 1, RankTable::kNone};
  for (uint32_t i = 0; i < n; ++i) {
    parts[i].joined = rank_of(i);
    if (parts[i].joined != RankTable::kNone) heap.push_back(uint64_t{parts[i].joined} << 32 | i);
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue({}, std::move(heap));
  const auto renew = [&](uint32_t begin) {
    parts[begin].joined = rank_of(begin);
    if (parts[begin].joined != RankTable::kNone) queue.push(uint64_t{parts[begin].joined} << 32 | begin);
  };
  while (!queue.empty()) {
    const auto rank = static_cast<uint32_t>(queue.top() >> 32);
    const auto begin = static_cast<uint32_t>(queue.top());
    queue.pop();
    if (parts[begin].joined != rank) continue;
    const uint32_t middle = parts[begin].end;
    parts[begin].end = parts[middle].end;
    parts[middle].joined = RankTable::kNone;
    if (parts[begin].end < n) parts[parts[begin].end].begin_of_previous = begin;
    renew(begin);
    if (begin > 0) renew(parts[begin].begin_of_previous);
  }
  for (uint32_t i = 0; i < n; i = parts[i].end) {
    ids.push_back(static_cast<int32_t>(ranks_.find(piece.substr(i, parts[i].end - i), end)));
  }
}

void Bpe::merge_remembered(std::string_view piece, Key key, uint64_t hash, const char* end,
                           std::vector<int32_t>& ids) const {
  MergeMemory::Entry& entry = MergeMemory::of_this_thread().at(hash);
  if (entry.key == key && entry.owner == owner_) {
    ids.insert(ids.end(), entry.ids, entry.ids + entry.count);
    return;
  }
  const size_t before = ids.size();
  merge_piece(piece, end, ids);
  const size_t count = ids.size() - before;
  if (count > MergeMemory::kMostIds) return;
  entry.key = key;
  entry.owner = owner_;
  entry.count = static_cast<int32_t>(count);
  std::copy(ids.begin() + static_cast<ptrdiff_t>(before), ids.end(), entry.ids);
}

// The rank table of a large vocabulary is larger than the near caches: a batch of pieces is split and its
// slots are asked for before the first one is needed.
size_t Bpe::encode_text(std::string_view text, std::vector<int32_t>& ids) const {
  struct Pending {
    std::string_view piece;
    Key key;
    uint64_t hash;
  };
  std::array<Pending, kBatch> batch;
  const char* const end = text.data() + text.size();
  size_t last = 0;
  for (Pretokenizer pieces(text); !pieces.done();) {
    size_t n = 0;
    for (; n < kBatch && !pieces.done(); ++n) {
      Pending& p = batch[n];
      p.piece = pieces.next();
      if (p.piece.size() > kShort) continue;
      p.key = load_key(p.piece, end);
      p.hash = hash_key(p.key);
      ranks_.prefetch_short(p.hash);
    }
    for (size_t i = 0; i < n; ++i) {
      const Pending& p = batch[i];
      const size_t before = ids.size();
      if (p.piece.size() > kShort) {
        encode_piece(p.piece, end, ids);
      } else if (const uint32_t rank = ranks_.find_short(p.key, p.hash); rank != RankTable::kNone) {
        ids.push_back(static_cast<int32_t>(rank));
      } else {
        merge_remembered(p.piece, p.key, p.hash, end, ids);
      }
      last = ids.size() - before;
    }
  }
  return last;
}

}  // namespace godwit
