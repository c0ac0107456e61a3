// Tokens on disk: shards of token ids with document boundaries, and the manifest that lists them.
//
// shard-00000.gwt, little-endian, used as mapped:
//   0   char magic[8]     "GWTOKENS"
//   8   u32 version       1, or 2 with a loss mask
//   12  u32 token_bytes   2 if every id of the vocabulary fits, else 4
//   16  u64 vocab_size
//   24  u64 tokens
//   32  u64 documents
//   40  u64 text_bytes    bytes of the text that the tokens stand for
//   48  u64 checksum      XXH3 of everything after the header
//   56  u64               XXH3 of the 56 bytes before
//   64  tokens, then zeros up to a multiple of 8
//       u64 token_offset[documents + 1]   document d holds the tokens token_offset[d] .. token_offset[d + 1]
//       u64 text_offset[documents + 1]    the same for its bytes of text
//       version 2: a bit for each token, lowest first, then zeros up to a multiple of 8 bytes: whether the
//       loss sees it (as the target of the token before it)
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "godwit/data/checked_file.h"

namespace godwit::data {

namespace fs = std::filesystem;

inline constexpr std::string_view kManifestFile = "manifest.json";

struct ShardInfo {
  std::string file;
  uint64_t tokens = 0;
  uint64_t documents = 0;
  uint64_t text_bytes = 0;
  uint64_t checksum = 0;   // as in the header
  std::string media = {};  // the file of its pictures (media_file.h); empty: it has none
  uint64_t media_checksum = 0;
};

// manifest.json of a directory of shards.
struct Manifest {
  std::string tokenizer_hash;
  int64_t vocab_size = 0;
  int64_t eos_id = 0;             // stands at the end of every document
  std::optional<int64_t> bos_id;  // stands at its beginning, if any
  std::vector<ShardInfo> shards;

  uint64_t tokens() const;
  uint64_t documents() const;
  uint64_t text_bytes() const;
};

Manifest read_manifest(const fs::path& directory);
void write_manifest(const fs::path& directory, const Manifest& manifest);

// 2 or 4.
int token_bytes_for(int64_t vocab_size);

class ShardWriter {
 public:
  ShardWriter(fs::path path, int64_t vocab_size);
  // `ids` must be in [0, vocab_size); may be empty. `trained`: one for each id, whether the loss sees it;
  // empty: all of them.
  void add_document(std::span<const int32_t> ids, uint64_t text_bytes, std::span<const uint8_t> trained = {});
  uint64_t tokens() const { return token_offsets_.back(); }
  uint64_t documents() const { return token_offsets_.size() - 1; }
  ShardInfo finish();

 private:
  CheckedWriter file_;
  int64_t vocab_size_;
  int token_bytes_;
  std::vector<uint64_t> token_offsets_{0};
  std::vector<uint64_t> text_offsets_{0};
  std::vector<uint8_t> mask_;  // bits; those past its end are 1
  bool masked_ = false;
  std::vector<uint16_t> narrow_;
};

// A mapped shard. Opening checks the header, the size and the offsets; damage inside the tokens shows in
// verify().
class TokenShard {
 public:
  explicit TokenShard(fs::path path);

  uint64_t tokens() const { return token_offsets_.back(); }
  uint64_t documents() const { return token_offsets_.size() - 1; }
  uint64_t text_bytes() const { return text_offsets_.back(); }
  int64_t vocab_size() const { return vocab_size_; }
  uint64_t checksum() const { return checksum_; }
  uint64_t document_tokens(uint64_t document) const {
    return token_offsets_[document + 1] - token_offsets_[document];
  }
  uint64_t document_text_bytes(uint64_t document) const {
    return text_offsets_[document + 1] - text_offsets_[document];
  }
  const fs::path& path() const { return file_.path(); }

  // Tokens begin .. begin + out.size() of the document. An id outside the vocabulary is an Error.
  void copy_tokens(uint64_t document, uint64_t begin, std::span<int64_t> out) const;
  bool masked() const { return !mask_.empty(); }
  // Whether the loss sees them, for tokens begin .. begin + out.size() of the document.
  void copy_trained(uint64_t document, uint64_t begin, std::span<uint8_t> out) const;
  // Reads everything and compares with the checksum.
  void verify() const;

 private:
  io::MappedFile file_;
  int64_t vocab_size_ = 0;
  int token_bytes_ = 0;
  uint64_t checksum_ = 0;
  std::span<const uint64_t> token_offsets_, text_offsets_;
  std::span<const std::byte> mask_;  // empty: the loss sees all
};

}  // namespace godwit::data
