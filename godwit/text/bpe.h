// Byte-pair encoding of one piece, with tiktoken's result: a piece that is a token is that token; otherwise,
// from single bytes, the two neighbours whose concatenation has the lowest rank merge first, the leftmost of
// equals first, until none can.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace godwit {

// A string of up to 15 bytes as two words: its bytes in little-endian order, zeros, and its length in the
// last byte.
struct Key {
  uint64_t low, high;
  bool operator==(const Key&) const = default;
};

// Bytes to rank by open addressing. Tokens of up to 15 bytes, nearly all, are compared as two words and never
// touch their text.
class RankTable {
 public:
  explicit RankTable(const std::vector<std::string>& tokens);

  static constexpr uint32_t kNone = UINT32_MAX;
  // Rank of `bytes`, or kNone. `end` is the end of the readable memory that holds `bytes`: 16 bytes are
  // loaded at once if there.
  uint32_t find(std::string_view bytes, const char* end) const;
  uint32_t find_short(Key key, uint64_t hash) const;
  void prefetch_short(uint64_t hash) const { __builtin_prefetch(&short_[hash & (short_.size() - 1)]); }

 private:
  struct alignas(32) ShortSlot {  // two in a cache line
    Key key{0, 0};                // length 0: empty
    uint32_t rank = kNone;
  };
  struct LongSlot {
    uint32_t hash = 0;
    uint32_t rank = kNone;  // kNone: empty
  };
  void insert(std::string_view bytes, uint32_t rank);
  uint32_t find_long(std::string_view bytes) const;

  std::vector<ShortSlot> short_;
  std::vector<LongSlot> long_;
  std::vector<std::string> long_tokens_;  // by rank, empty where the token is short
  size_t longest_ = 0;
};

class Bpe {
 public:
  explicit Bpe(const std::vector<std::string>& tokens);

  // Appends the ids of one piece.
  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
    encode_piece(piece, piece.data() + piece.size(), ids);
  }

  // Appends the ids of all pieces of `text` by the K3 pattern, and returns how many of them the last piece
  // has. Thread-safe: what it remembers belongs to the thread.
  size_t encode_text(std::string_view text, std::vector<int32_t>& ids) const;

 private:
  void encode_piece(std::string_view piece, const char* end, std::vector<int32_t>& ids) const;
  void merge_piece(std::string_view piece, const char* end, std::vector<int32_t>& ids) const;
  void merge_short(std::string_view piece, const char* end, std::vector<int32_t>& ids) const;
  void merge_long(std::string_view piece, const char* end, std::vector<int32_t>& ids) const;
  void merge_remembered(std::string_view piece, Key key, uint64_t hash, const char* end,
                        std::vector<int32_t>& ids) const;

  RankTable ranks_;
  uint64_t owner_;  // marks this object's entries in a thread's memory of merges
};

}  // namespace godwit
