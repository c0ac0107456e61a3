// K3's chat format (XTML), messages to ids. With OPEN, CLOSE, SEP, END the special tokens <|open|>,
// <|close|>, <|sep|>,
// <|end_of_msg|>:
//
//   tag      = OPEN name (' ' key '="' value '"')* SEP  body  CLOSE name SEP        values escape & and "
//   message  = tag "message" role="..." ..., then END
//   assistant's body = think channel (thinking mode only, always there), response channel, tools channel if
//   it calls any tools    = call tool="..." index="1": argument key="..." type="..." ...
//
// A chat is a list of segments. Only segments with `control` are encoded with specials allowed; whatever
// users, tools or the model wrote is encoded without, so that no text can forge structure. Segments are
// encoded one by one: their borders are borders of tokens, and are part of the format.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "godwit/text/tokenizer.h"

namespace godwit {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

// Text, or an image in its place.
struct ChatPart {
  std::string text = {};
  bool is_image = false;
  std::string image_url = {};  // as it came; whoever decodes the image fills in the rest
  int64_t width = 0;           // of the original, in pixels
  int64_t height = 0;
  int64_t tokens = 1;  // <|media_pad|> tokens, one for each vector of the vision tower
};

struct ChatToolCall {
  std::string id = {};  // opaque; links a result to its call
  std::string name = {};
  std::string arguments = {};  // a JSON object as text; text that is no JSON is passed on as a json block
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string name = {};  // optional; of a tool message: the tool
  std::vector<ChatPart> content = {};
  std::string reasoning = {};                 // assistant: the think channel
  std::vector<ChatToolCall> tool_calls = {};  // assistant
  std::string tool_call_id = {};              // tool
  std::string tools = {};  // system: a JSON list of tools to add from here on; the content is then not shown
  bool train = true;       // assistant: whether the loss sees it
};

enum class ToolChoice { kAuto, kRequired, kNone };

struct ChatOptions {
  bool thinking = true;
  std::string thinking_effort = {};  // low, high, max, or empty for no word about it
  std::string tools = {};            // a JSON list of tools, or empty
  ToolChoice tool_choice = ToolChoice::kAuto;
  // The tools that may be called; empty: all of them. The prompt does not say so.
  std::vector<std::string> tool_names = {};
  bool parallel_calls = true;        // more than one call in a turn; the prompt does not say so
  bool json_response = false;        // response_format json_object, or json_schema when there is one
  std::string response_schema = {};  // a JSON schema, or empty
  bool generation_prompt = true;     // end with the opening of the assistant's turn
};

struct ChatSegment {
  std::string text = {};
  bool control = false;  // encode with special tokens
  bool trained = false;  // inside an assistant's turn, after its opening tag, up to and with END
};

// The whole chat: tool declaration, thinking effort, messages (results of tools in the order of the calls),
// tool choice, response format, opening of the turn. Throws Error that names the message (from 0) for what
// cannot be written.
std::vector<ChatSegment> render_chat(std::span<const ChatMessage> messages, const ChatOptions& options);

// What follows the sampled turn `assistant` when `messages` come next: for appending to sampled ids, which
// must never be encoded again. No tool declaration and no thinking effort; the turn's opening if
// options.generation_prompt.
std::vector<ChatSegment> render_continuation(const ChatMessage& assistant,
                                             std::span<const ChatMessage> messages,
                                             const ChatOptions& options);

// The prompt of one image of `width` x `height` pixels, a control segment: "<|media_begin|>image
// 640x480<|media_content|>", `tokens` times "<|media_pad|>", "<|media_end|>".
std::string image_prompt(int64_t width, int64_t height, int64_t tokens);

// The same for frames of a video that become vectors together, "video" in the place of "image": K3's own
// words are not known.
std::string video_prompt(int64_t width, int64_t height, int64_t tokens);

// Stands for an image in a text; what of the released configuration is `image_placeholder`.
inline constexpr std::string_view kImagePlaceholder = "<|kimi_image_placeholder|>";

struct ChatIds {
  std::vector<int32_t> ids;
  std::vector<uint8_t> trained;  // one for each id
};

// Throws Error if the tokenizer lacks a special token of the format.
ChatIds encode_chat(std::span<const ChatSegment> segments, const Tokenizer& tokenizer);

// All segments as one text, for people to read.
std::string chat_text(std::span<const ChatSegment> segments);

}  // namespace godwit
