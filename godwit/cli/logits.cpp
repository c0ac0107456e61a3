// `godwit logits`: a token sequence through the model, whole or in pieces on a carried state.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <numeric>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/safetensors.h"
#include "godwit/io/video.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "godwit/model/media.h"

namespace godwit::cli {
namespace {

void append(const at::Tensor& logits, io::SafetensorsWriter& writer) {
  const at::Tensor rows = logits.to(at::kCPU, at::kFloat).contiguous();
  writer.append("logits", {static_cast<const std::byte*>(rows.data_ptr()), rows.nbytes()});
}

// Each run of <|media_pad|> as long as a picture's tokens, or else the first of them alone, becomes the next
// picture's.
void expand_places(const ModelConfig& config, const MediaList& media, std::vector<int32_t>& ids) {
  std::vector<int32_t> out;
  size_t next = 0;
  for (size_t i = 0; i < ids.size();) {
    if (media.empty() || ids[i] != config.media_id) {
      out.push_back(ids[i++]);
      continue;
    }
    check(next < media.size(), "--tokens has more <|media_pad|> than --image accounts for: {} images",
          media.size());
    const int64_t tokens = media[next++]->tokens;
    int64_t run = 0;
    while (run < tokens && i + run < ids.size() && ids[i + run] == config.media_id) ++run;
    i += run == tokens ? run : 1;
    out.insert(out.end(), tokens, static_cast<int32_t>(config.media_id));
  }
  check(next == media.size(), "--tokens has <|media_pad|> for {} of {} images", next, media.size());
  ids = std::move(out);
}

MediaList load_pictures(const LogitsArgs& args, const ModelConfig& config) {
  MediaList media;
  if (args.images.empty()) return media;
  check(config.vision.has_value(), "--image: {} has no vision tower", args.model);
  const io::ImageProcessorConfig processor = load_image_processor(args.model, config);
  for (const std::string& path : args.images)
    media.push_back(read_picture(*config.vision, processor, io::read_media_file(path), path));
  return media;
}

// The tower's vectors of all pictures; undefined without.
at::Tensor encode_pictures(const ModelConfig& config, const ModelWeights& weights, const MediaList& media) {
  if (media.empty()) return {};
  check(weights.vision.has_value(), "--image: the model's files have no vision tower");
  return vision_forward(config, *weights.vision, vision_input(*config.vision, media));
}

}  // namespace

int run_logits(const LogitsArgs& args) {
  const at::NoGradGuard no_grad;
  const at::Device device = apply_device(args.device);
  const ModelConfig config = load_model_config(args.model);
  std::vector<int32_t> ids = parse_ids(read_file(args.tokens), config.vocab_size, args.tokens);
  const MediaList media = load_pictures(args, config);
  expand_places(config, media, ids);
  const auto tokens = static_cast<int64_t>(ids.size());
  check(tokens > 0, "{}: no token ids: there are no logits of nothing", args.tokens);
  if (!args.split.empty()) {
    const int64_t sum = std::accumulate(args.split.begin(), args.split.end(), int64_t{0});
    check(sum == tokens, "--split: the pieces have {} tokens, {} has {}", sum, args.tokens, tokens);
  }
  const ModelWeights weights = load_weights(config, args.model, device, *scalar_type_option(args.dtype),
                                            weight_format_of(args.weights));
  const at::Tensor all = at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong).to(device);

  io::SafetensorsWriter writer(
      args.out, {{.name = "logits", .dtype = io::Dtype::F32, .shape = {tokens, config.vocab_size}}});
  const PackedBatch whole{
      .ids = all, .cu_seqlens = make_cu_seqlens({tokens}), .media = encode_pictures(config, weights, media)};
  if (args.split.empty()) {
    append(forward_logits(config, weights, whole), writer);
  } else {
    ModelState state(config, {.sequences = 1}, device, weights.embed.scalar_type());
    int64_t at = 0;
    for (const int64_t piece : args.split) {
      const PackedBatch batch{.ids = all.narrow(0, at, piece),
                              .cu_seqlens = make_cu_seqlens({piece}),
                              .media = media_of(config, whole, at, piece)};
      append(forward_logits(config, weights, batch, &state), writer);
      at += piece;
    }
  }
  writer.commit();
  return 0;
}

}  // namespace godwit::cli
