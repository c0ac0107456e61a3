// `godwit generate`: continues a prompt.
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/infer/generate.h"
#include "godwit/text/stream_decoder.h"

namespace godwit::cli {

int run_generate(const GenerateArgs& args) {
  const LoadedModel model = load(args.model);
  Request request{.prompt = model.tokenizer.encode(args.prompt),
                  .sampling = sampling_params(args.model),
                  .max_tokens = args.model.max_tokens,
                  .stop_ids = text_stop_ids(model)};
  Engine engine(model,
                single_sequence(model, static_cast<int64_t>(request.prompt.size()) + request.max_tokens));
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
