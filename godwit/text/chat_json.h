// Chat messages as OpenAI-style JSON, and the two ways in which the chat format writes JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/text/chat_format.h"

namespace godwit {

// A list of {"role", "content", ...}. Content is text, null, or a list of {"type": "text" | "image_url",
// ...}; an assistant may have "reasoning_content" (or "reasoning"), "tool_calls" and "weight" (0: not
// trained); a tool message "tool_call_id" and "name". Throws Error that names the message and key.
std::vector<ChatMessage> messages_from_json(const nlohmann::ordered_json& messages);

// The keys of an OpenAI-style request that shape the prompt or the turn: tools, tool_choice (auto, none,
// required, the function to call, or allowed_tools), parallel_tool_calls, response_format (text, json_object,
// json_schema), thinking (bool, or {"type": "enabled" | "disabled"}), thinking_effort, reasoning_effort (none
// turns thinking off; OpenAI's words stand for the nearest of K3's), chat_template_kwargs with the same keys.
// Other keys are not looked at. Errors begin with the path of the key.
ChatOptions chat_options_from_json(const nlohmann::ordered_json& request);

// One message in the same form; empty keys are left out.
nlohmann::ordered_json message_to_json(const ChatMessage& message);

// Keys sorted at every depth, separators "," and ":", no ASCII escapes: declarations of tools and schemas.
std::string json_sorted_compact(std::string_view json, const char* what);

// Order kept, separators ", " and ": ", no ASCII escapes, numbers as Python writes them: values of arguments.
std::string json_python_style(const nlohmann::ordered_json& value);

}  // namespace godwit
