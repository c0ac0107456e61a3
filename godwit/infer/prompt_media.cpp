#include "godwit/infer/prompt_media.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/model/vision.h"

namespace godwit {
namespace {

void check_sees(const LoadedModel& model) {
  check(model.config.vision.has_value() && model.weights.vision.has_value(), "this model takes no images");
  check(model.config.media_id >= 0, "this model has no media_placeholder_token_id");
}

}  // namespace

std::shared_ptr<const MediaItem> read_image(const LoadedModel& model, std::string_view file,
                                            const std::string& where) {
  check_sees(model);
  return read_picture(*model.config.vision, model.images, file, where);
}

MediaList read_images(
    const LoadedModel& model, std::span<ChatMessage> messages,
    const std::function<std::string(const std::string& url, const std::string& where)>& bytes_of) {
  MediaList media;
  for (size_t m = 0; m < messages.size(); ++m) {
    for (size_t p = 0; p < messages[m].content.size(); ++p) {
      ChatPart& part = messages[m].content[p];
      if (!part.is_image) continue;
      const std::string where = fmt::format("messages[{}].content[{}]", m, p);
      check_sees(model);
      media.push_back(read_image(model, bytes_of(part.image_url, where), where));
      part.width = media.back()->width;
      part.height = media.back()->height;
      part.tokens = media.back()->tokens;
    }
  }
  return media;
}

PromptMedia::PromptMedia(const LoadedModel& model, std::span<const int32_t> prompt, MediaList items)
    : model_(model), items_(std::move(items)), keys_(prompt.begin(), prompt.end()) {
  if (!items_.empty()) check_sees(model);
  if (!model.config.vision) return;
  made_.resize(items_.size());
  first_.push_back(0);
  for (const auto& item : items_) first_.push_back(first_.back() + item->tokens);
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] == model.config.media_id) places_.push_back(static_cast<int64_t>(i));
  }
  check(static_cast<int64_t>(places_.size()) == first_.back(),
        "the prompt has {} <|media_pad|> tokens, its {} image{} stand{} for {}", places_.size(),
        items_.size(), items_.size() == 1 ? "" : "s", items_.size() == 1 ? "s" : "", first_.back());
  for (size_t item = 0; item < items_.size(); ++item) {
    const auto key = static_cast<int64_t>(items_[item]->hash | uint64_t{1} << 63);
    for (int64_t place = first_[item]; place < first_[item + 1]; ++place) keys_[places_[place]] = key;
  }
}

at::Tensor PromptMedia::vectors(int64_t from, int64_t to) {
  const auto place_at = [&](int64_t token) {
    return std::lower_bound(places_.begin(), places_.end(), token) - places_.begin();
  };
  const int64_t begin = place_at(from), end = place_at(to);
  if (begin == end) return {};
  const at::NoGradGuard no_grad;
  const auto item_of = [&](int64_t place) {
    return static_cast<size_t>(std::upper_bound(first_.begin(), first_.end(), place) - first_.begin()) - 1;
  };
  MediaList wanted;
  std::vector<size_t> numbers;
  for (size_t item = item_of(begin); item <= item_of(end - 1); ++item) {
    if (made_[item].defined()) continue;
    wanted.push_back(items_[item]);
    numbers.push_back(item);
  }
  if (!wanted.empty()) {
    const at::Tensor all =
        vision_forward(model_.config, *model_.weights.vision, vision_input(*model_.config.vision, wanted));
    int64_t at = 0;
    for (const size_t item : numbers) {
      made_[item] = all.narrow(0, at, items_[item]->tokens);
      at += items_[item]->tokens;
    }
  }
  std::vector<at::Tensor> parts;
  for (size_t item = item_of(begin); item <= item_of(end - 1); ++item) {
    const int64_t first = std::max(begin, first_[item]), last = std::min(end, first_[item + 1]);
    parts.push_back(made_[item].narrow(0, first - first_[item], last - first));
  }
  return at::cat(parts);
}

}  // namespace godwit
