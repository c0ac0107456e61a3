// A directory of token shards as one numbered list of documents.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "godwit/data/media_file.h"
#include "godwit/data/token_shard.h"
#include "godwit/io/image_processor.h"

namespace godwit::data {

// Tokens begin .. begin + length of one document.
struct Segment {
  uint64_t document;
  uint64_t begin;
  uint64_t length;
};

class TokenDataset {
 public:
  // Maps every shard and checks it against the manifest (not the checksums: verify()).
  explicit TokenDataset(fs::path directory);

  const fs::path& path() const { return directory_; }
  const Manifest& manifest() const { return manifest_; }
  uint64_t documents() const { return first_document_.back(); }
  uint64_t tokens() const { return manifest_.tokens(); }
  uint64_t text_bytes() const { return manifest_.text_bytes(); }
  // Differs for different contents; the same wherever the directory lies.
  uint64_t fingerprint() const { return fingerprint_; }

  uint64_t document_tokens(uint64_t document) const;
  uint64_t document_text_bytes(uint64_t document) const;
  void copy_tokens(uint64_t document, uint64_t begin, std::span<int64_t> out) const;
  // Whether the loss sees them; true for all of a text, for what the assistant wrote of a conversation.
  void copy_trained(uint64_t document, uint64_t begin, std::span<uint8_t> out) const;
  // Tokens of the document that can be targets: trained, and not its first.
  uint64_t document_targets(uint64_t document) const;

  bool has_media() const { return has_media_; }
  const io::ImageProcessorConfig& processor() const { return processor_; }
  // Of all pictures together: patches of all frames, and the placeholders of their vectors.
  uint64_t media_patches() const { return media_patches_; }
  uint64_t media_vectors() const { return media_vectors_; }
  // The pictures of a document, in order; and one frame of them as it was encoded.
  std::span<const MediaRecord> media(uint64_t document) const;
  io::Bytes media_frame(uint64_t document, uint64_t frame) const;

  void verify() const;

 private:
  struct Place {
    const TokenShard* shard;
    const MediaFile* media;  // or null
    uint64_t document;       // inside them
  };
  Place place(uint64_t document) const;
  std::unique_ptr<const MediaFile> open_media(const ShardInfo& info, const TokenShard& shard) const;

  fs::path directory_;
  Manifest manifest_;
  std::vector<std::unique_ptr<const TokenShard>> shards_;
  std::vector<std::unique_ptr<const MediaFile>> media_;  // of each shard; null without pictures
  bool has_media_ = false;
  uint64_t media_patches_ = 0, media_vectors_ = 0;
  io::ImageProcessorConfig processor_;
  std::vector<uint64_t> first_document_;  // of each shard, and the total
  uint64_t fingerprint_ = 0;
};

// What pack_corpus wrote to `directory`: with a held-out part the two are in train/ and heldout/, otherwise
// everything is in `directory`.
std::shared_ptr<const TokenDataset> open_train(const fs::path& directory);
std::shared_ptr<const TokenDataset> open_heldout(const fs::path& directory);  // none: a null pointer

}  // namespace godwit::data
