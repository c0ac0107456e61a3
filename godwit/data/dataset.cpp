#include "godwit/data/dataset.h"

#include <algorithm>
#include <string>
#include <system_error>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"

namespace godwit::data {

TokenDataset::TokenDataset(fs::path directory)
    : directory_(std::move(directory)), manifest_(read_manifest(directory_)) {
  first_document_.push_back(0);
  std::string content = manifest_.tokenizer_hash;
  for (const auto& info : manifest_.shards) {
    const auto& shard = *shards_.emplace_back(std::make_unique<const TokenShard>(directory_ / info.file));
    check(shard.tokens() == info.tokens && shard.documents() == info.documents &&
              shard.text_bytes() == info.text_bytes && shard.checksum() == info.checksum &&
              shard.vocab_size() == manifest_.vocab_size,
          "{} is not the shard that {} describes", shard.path().string(),
          (directory_ / kManifestFile).string());
    first_document_.push_back(first_document_.back() + shard.documents());
    content += io::hex64(info.checksum);
    media_.push_back(open_media(info, shard));
    if (!media_.back()) continue;
    has_media_ = true;
    for (const MediaRecord& item : media_.back()->all()) {
      media_patches_ += uint64_t{item.frames} * item.rows * item.columns;
      media_vectors_ += item.tokens;
    }
    content += io::hex64(info.media_checksum);
  }
  if (has_media_) processor_ = io::load_image_processor(directory_);
  fingerprint_ = io::xxh3(content);
}

TokenDataset::Place TokenDataset::place(uint64_t document) const {
  check(document < documents(), "{}: document {} of {}", directory_.string(), document, documents());
  const auto next = std::ranges::upper_bound(first_document_, document);
  const auto shard = static_cast<size_t>(next - first_document_.begin()) - 1;
  return {shards_[shard].get(), media_[shard].get(), document - first_document_[shard]};
}

uint64_t TokenDataset::document_tokens(uint64_t document) const {
  const Place at = place(document);
  return at.shard->document_tokens(at.document);
}

uint64_t TokenDataset::document_text_bytes(uint64_t document) const {
  const Place at = place(document);
  return at.shard->document_text_bytes(at.document);
}

void TokenDataset::copy_tokens(uint64_t document, uint64_t begin, std::span<int64_t> out) const {
  const Place at = place(document);
  const uint64_t length = at.shard->document_tokens(at.document);
  check(begin <= length && out.size() <= length - begin, "{}: tokens {} to {} of document {}, which has {}",
        directory_.string(), begin, begin + out.size(), document, length);
  at.shard->copy_tokens(at.document, begin, out);
}

void TokenDataset::copy_trained(uint64_t document, uint64_t begin, std::span<uint8_t> out) const {
  const Place at = place(document);
  const uint64_t length = at.shard->document_tokens(at.document);
  check(begin <= length && out.size() <= length - begin, "{}: tokens {} to {} of document {}, which has {}",
        directory_.string(), begin, begin + out.size(), document, length);
  at.shard->copy_trained(at.document, begin, out);
}

uint64_t TokenDataset::document_targets(uint64_t document) const {
  const Place at = place(document);
  const uint64_t length = at.shard->document_tokens(at.document);
  if (length == 0) return 0;
  if (!at.shard->masked()) return length - 1;
  std::vector<uint8_t> trained(length - 1);
  at.shard->copy_trained(at.document, 1, trained);
  return static_cast<uint64_t>(std::ranges::count(trained, 1));
}

// The pictures beside a shard, each in its place.
std::unique_ptr<const MediaFile> TokenDataset::open_media(const ShardInfo& info,
                                                          const TokenShard& shard) const {
  if (info.media.empty()) return nullptr;
  auto media = std::make_unique<const MediaFile>(directory_ / info.media);
  check(media->checksum() == info.media_checksum, "{} is not the file that {} describes",
        media->path().string(), (directory_ / kManifestFile).string());
  for (const MediaRecord& item : media->all()) {
    const bool inside = item.document < shard.documents() &&
                        item.token <= shard.document_tokens(item.document) &&
                        item.tokens <= shard.document_tokens(item.document) - item.token;
    check(inside, "{}: a picture outside the documents of {}", media->path().string(), info.file);
  }
  return media;
}

std::span<const MediaRecord> TokenDataset::media(uint64_t document) const {
  if (!has_media_) return {};
  const Place at = place(document);
  return at.media ? at.media->items(at.document) : std::span<const MediaRecord>();
}

io::Bytes TokenDataset::media_frame(uint64_t document, uint64_t frame) const {
  return place(document).media->frame(frame);
}

void TokenDataset::verify() const {
  for (const auto& media : media_) {
    if (media) media->verify();
  }
  parallel_for(0, static_cast<int64_t>(shards_.size()), /*grain=*/1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) shards_[i]->verify();
  });
}

std::shared_ptr<const TokenDataset> open_train(const fs::path& directory) {
  std::error_code error;
  const bool split = fs::is_directory(directory / "train", error);
  return std::make_shared<const TokenDataset>(split ? directory / "train" : directory);
}

std::shared_ptr<const TokenDataset> open_heldout(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(directory / "heldout", error)) return nullptr;
  return std::make_shared<const TokenDataset>(directory / "heldout");
}

}  // namespace godwit::data
