// `godwit generate`: continues a prompt.
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/infer/session.h"
#include "godwit/text/stream_decoder.h"

namespace godwit::cli {

int run_generate(const GenerateArgs& args) {
  const LoadedModel model = load(args.model);
  Session session(model);
  const GenerateOptions options{.sampling = sampling_params(args.model),
                                .max_tokens = args.model.max_tokens,
                                .stop_ids = text_stop_ids(model)};
  StreamDecoder decoder(model.tokenizer);
  std::string text;
  const auto show = [&](const std::string& piece) {
    text += piece;
    if (!args.json && !piece.empty()) write_out(piece);
  };
  const Generation out = session.generate(model.tokenizer.encode(args.prompt), options, [&](int32_t id) {
    show(decoder.push(id));
    return true;
  });
  show(decoder.finish());
  if (args.json) {
    print_json({{"text", text},
                {"token_ids", out.ids},
                {"logprobs", out.logprobs},
                {"finish_reason", out.finish_reason},
                {"prompt_tokens", out.prompt_tokens},
                {"tokens_per_s", out.tokens_per_s()}});
    return 0;
  }
  write_out("\n");
  if (::isatty(STDERR_FILENO) == 1) {
    fmt::print(stderr, "[{} tokens after {}, {:.1f} tokens/s, {}]\n", out.ids.size(), out.prompt_tokens,
               out.tokens_per_s(),
               out.finish_reason == "stop" ? "ended by the model" : "cut at --max-tokens");
  }
  return 0;
}

}  // namespace godwit::cli
