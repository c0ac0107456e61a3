// serve/protocol: any bytes as the body of a request. The first byte chooses the call. What is accepted is
// written as a prompt too, which must hold no special token that the format did not put there.
#include "godwit/serve/protocol.h"

#include "godwit/serve/request_body.h"
#include "godwit/text/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/vocabulary.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  if (size == 0) return 0;
  const std::string body(fuzz::text(data + 1, size - 1));
  const Tokenizer& tokenizer = fuzz::vocabulary();
  fuzz::accepts([&] {
    const serve::Json request = serve::parse_object(body);
    if (data[0] % 2) {
      serve::check_keys(request, serve::Call::kCompletion);
      serve::completion_params(request, /*chat=*/false);
      const serve::PromptReader reader(tokenizer, {.tokens = 4096, .param = "prompt", .too_long = "no"},
                                       [] { return false; });
      const serve::PromptRules rules{.most_prompts = 128, .vocab_size = tokenizer.vocab_size()};
      for (const auto& ids : serve::completion_prompts(request, reader, rules)) {
        for (const int32_t id : ids) fuzz::require(id >= 0);
      }
      return;
    }
    serve::check_keys(request, serve::Call::kChat);
    const serve::ChatRequest chat = serve::chat_request(request);
    for (const ChatMessage& message : chat.messages) {
      for (const ChatPart& part : message.content) {
        if (part.is_image) return;  // not written before it is decoded
      }
    }
    const auto segments = render_chat(chat.messages, chat.options);
    size_t marks = 0;
    for (const ChatSegment& segment : segments) marks += segment.control ? 1 : 0;
    size_t specials = 0;
    for (const int32_t id : encode_chat(segments, tokenizer).ids)
      specials += tokenizer.is_special(id) ? 1 : 0;
    fuzz::require(specials == marks);
  });
  return 0;
}
