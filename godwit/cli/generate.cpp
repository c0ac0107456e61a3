// `godwit generate`: continues a prompt.
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/infer/generate.h"
#include "godwit/text/chat_format.h"
#include "godwit/text/stream_decoder.h"

namespace godwit::cli {

namespace {

// The text with the pictures where it says <|kimi_image_placeholder|>; where it nowhere does, before it.
std::vector<int32_t> encode_prompt(const LoadedModel& model, std::string_view text, const MediaList& media) {
  std::vector<int32_t> ids;
  const auto picture = [&](const MediaItem& item) {
    const std::string prompt = image_prompt(item.width, item.height, item.tokens);
    const std::vector<int32_t> more = model.tokenizer.encode_with_specials(prompt);
    ids.insert(ids.end(), more.begin(), more.end());
  };
  size_t used = 0;
  if (text.find(kImagePlaceholder) == std::string_view::npos) {
    for (const auto& item : media) picture(*item);
    used = media.size();
  }
  for (size_t at = 0; at <= text.size() && !media.empty();) {
    const size_t end = std::min(text.find(kImagePlaceholder, at), text.size());
    model.tokenizer.encode_append(text.substr(at, end - at), ids);
    at = end + kImagePlaceholder.size();
    if (end == text.size()) break;
    check(used < media.size(), "--prompt has more places for images than there are: {}", media.size());
    picture(*media[used++]);
  }
  if (media.empty()) {
    check(!model.config.vision || text.find(kImagePlaceholder) == std::string::npos,
          "--prompt has places for images and there are none");
    model.tokenizer.encode_append(text, ids);
  }
  check(used == media.size(), "--prompt has places for {} of {} images", used, media.size());
  return ids;
}

}  // namespace

int run_generate(const GenerateArgs& args) {
  const LoadedModel model = load(args.model);
  MediaList media;
  for (const std::string& path : args.images) media.push_back(load_picture(model, path));
  Request request{.prompt = encode_prompt(model, args.prompt, media),
                  .media = media,
                  .sampling = sampling_params(args.model),
                  .max_tokens = args.model.max_tokens,
                  .stop_ids = text_stop_ids(model)};
  Engine engine(model,
                single_sequence(model, static_cast<int64_t>(request.prompt.size()) + request.max_tokens,
                                args.model.draft_tokens));
  StreamDecoder decoder(model.tokenizer);
  std::string text;
  const auto show = [&](const std::string& piece) {
    text += piece;
    if (!args.json && !piece.empty()) write_out(piece);
  };
  request.on_token = [&](int64_t, const DrawnToken& token) {
    show(decoder.push(token.id));
    return true;
  };
  const Generation out = generate(engine, std::move(request));
  show(decoder.finish());
  if (args.json) {
    print_json({{"text", text},
                {"token_ids", out.ids},
                {"logprobs", out.logprobs},
                {"finish_reason", out.finish.reason == FinishReason::kStop ? "stop" : "length"},
                {"prompt_tokens", out.finish.prompt_tokens},
                {"tokens_per_s", out.tokens_per_s()}});
    return 0;
  }
  write_out("\n");
  if (::isatty(STDERR_FILENO) == 1) {
    fmt::print(stderr, "[{} tokens after {}, {:.1f} tokens/s, {}]\n", out.ids.size(),
               out.finish.prompt_tokens, out.tokens_per_s(),
               out.finish.reason == FinishReason::kStop ? "ended by the model" : "cut at --max-tokens");
  }
  return 0;
}

}  // namespace godwit::cli
