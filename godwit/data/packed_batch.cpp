#include "godwit/data/packed_batch.h"

#include <algorithm>
#include <span>

#include "godwit/base/check.h"
#include "godwit/io/image.h"

namespace godwit::data {
namespace {

// Decodes the frames of an item.
void append_patches(const TokenDataset& dataset, uint64_t document, const MediaRecord& item,
                    std::vector<uint8_t>& pixels) {
  const std::string where = fmt::format("{}: document {}", dataset.path().string(), document);
  io::ImagePlan plan;
  for (uint64_t i = 0; i < item.frames; ++i) {
    const io::Image image = io::decode_image(dataset.media_frame(document, item.first_frame + i), where);
    if (i == 0) plan = io::plan_image(image.width, image.height, dataset.processor());
    check(plan.grid_height == item.rows && plan.grid_width == item.columns,
          "{}: a picture of {} x {} patches, packed as {} x {}", where, plan.grid_height, plan.grid_width,
          item.rows, item.columns);
    io::append_patch_bytes(io::prepare_image_as(image, plan, dataset.processor()), dataset.processor(),
                           pixels);
  }
}

}  // namespace

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
  for (const MediaRecord& item : dataset.media(segment.document)) {
    const uint64_t first = std::max(item.token, segment.begin);
    const uint64_t last = std::min(item.token + item.tokens, segment.begin + segment.length);
    if (first >= last) continue;
    if (media.empty()) values = io::pixel_values(dataset.processor());
    append_patches(dataset, segment.document, item, pixels);
    media.push_back({item.frames, item.rows, item.columns, static_cast<int64_t>(first - item.token),
                     static_cast<int64_t>(last - first)});
  }
}

}  // namespace godwit::data
