#include "godwit/data/tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <span>

#include "godwit/base/check.h"
#include "godwit/io/checksum.h"
#include "godwit/text/chat_json.h"

namespace godwit::data {

namespace {

const std::regex kSpecial(R"(<\|[a-z_]+\|>)");

bool is_trained(const ChatMessage& message) {
  return message.role == ChatRole::kAssistant && message.train;
}

std::vector<ChatSegment> chat_segments(std::string_view line) {
  const auto json = nlohmann::ordered_json::parse(line);
  const std::vector<ChatMessage> messages = messages_from_json(json.at("messages"));
  check(std::ranges::any_of(messages, is_trained), "no assistant message to train on");
  for (const ChatMessage& message : messages)
    check(std::ranges::none_of(message.content, &ChatPart::is_image),
          "images in conversations are not packed");
  ChatOptions options = chat_options_from_json(json);
  options.generation_prompt = false;
  return render_chat(messages, options);
}

}  // namespace

std::string tokenizer_hash(const Tokenizer& tokenizer) {
  io::Xxh3 hash;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    const auto length = static_cast<uint32_t>(bytes.size());
    hash.update(std::as_bytes(std::span(&length, 1)));
    hash.update(io::as_bytes(bytes));
  }
  return io::hex64(hash.digest());
}

ChatSample chat_sample(const Tokenizer& tokenizer, std::string_view line, const std::string& where) {
  try {
    std::vector<ChatSegment> segments = chat_segments(line);
    ChatIds encoded = encode_chat(segments, tokenizer);
    std::erase_if(segments, [](const ChatSegment& s) { return !s.trained; });
    return {std::move(encoded.ids), std::move(encoded.trained), chat_text(segments)};
  } catch (const std::exception& error) {
    fail("{}: {}", where, error.what());
  }
}

std::string plain_text(const Document& document) {
  if (!document.chat) return std::string(document.text);
  std::string text;
  try {
    for (const ChatSegment& segment : chat_segments(document.text)) {
      text += segment.control ? std::regex_replace(segment.text, kSpecial, "\n") : segment.text;
    }
  } catch (const std::exception& error) {
    fail("{}: {}", document.where, error.what());
  }
  return text;
}

PackTokenizer pack_tokenizer(const Tokenizer& tokenizer) {
  return {
      .encode = [&tokenizer](std::string_view text,
                             std::vector<int32_t>& ids) { tokenizer.encode_append(text, ids); },
      .encode_chat = [&tokenizer](std::string_view line,
                                  const std::string& where) { return chat_sample(tokenizer, line, where); },
      .vocab_size = tokenizer.vocab_size(),
      .eos_id = tokenizer.special_id(kEos),
      .bos_id = {},
      .hash = tokenizer_hash(tokenizer)};
}

}  // namespace godwit::data
