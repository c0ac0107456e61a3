// Datasets of chosen document lengths. Token i of document d is (1000 d + i) mod 65000, so every token tells
// where it is from.
#pragma once

#include <memory>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/data/dataset.h"

namespace godwit::data {

inline constexpr int64_t kSmallVocab = 65000;

inline int64_t small_token(uint64_t document, uint64_t i) {
  return static_cast<int64_t>((1000 * document + i) % kSmallVocab);
}

// In shards of at most `shard_documents`.
inline std::shared_ptr<const TokenDataset> small_dataset(const fs::path& directory,
                                                         const std::vector<uint64_t>& lengths,
                                                         size_t shard_documents = 3) {
  fs::create_directories(directory);
  Manifest manifest{"hash", kSmallVocab, 0, {}, {}};
  std::unique_ptr<ShardWriter> shard;
  for (size_t d = 0; d < lengths.size(); ++d) {
    if (!shard)
      shard = std::make_unique<ShardWriter>(
          directory / fmt::format("shard-{:05d}.gwt", manifest.shards.size()), kSmallVocab);
    std::vector<int32_t> ids;
    for (uint64_t i = 0; i < lengths[d]; ++i) ids.push_back(static_cast<int32_t>(small_token(d, i)));
    shard->add_document(ids, 3 * lengths[d]);
    if ((d + 1) % shard_documents == 0 || d + 1 == lengths.size()) {
      manifest.shards.push_back(shard->finish());
      shard.reset();
    }
  }
  write_manifest(directory, manifest);
  return std::make_shared<const TokenDataset>(directory);
}

}  // namespace godwit::data
