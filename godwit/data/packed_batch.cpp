#include "godwit/data/packed_batch.h"

#include <span>

namespace godwit::data {

void PackedBatch::append(const TokenDataset& dataset, int64_t entry, const Segment& segment) {
  const size_t at = ids.size();
  // One token more than the segment if the document has it: the target of the last one.
  const bool goes_on = segment.begin + segment.length < dataset.document_tokens(segment.document);
  ids.resize(at + segment.length + goes_on);
  dataset.copy_tokens(segment.document, segment.begin, std::span(ids).subspan(at));
  targets.insert(targets.end(), ids.begin() + static_cast<int64_t>(at) + 1, ids.end());
  std::vector<uint8_t> trained(ids.size() - at - 1);
  dataset.copy_trained(segment.document, segment.begin + 1, trained);
  for (size_t i = 0; i < trained.size(); ++i) {
    if (!trained[i]) targets[at + i] = kNoTarget;
  }
  if (!goes_on) targets.push_back(kNoTarget);
  ids.resize(at + segment.length);
  cu_seqlens.push_back(static_cast<int64_t>(ids.size()));
  pieces.push_back({entry, segment.document, segment.begin});
}

}  // namespace godwit::data
