// The body of a request: whether it is JSON that can be built and walked in good time, and whether its keys
// are ones that this server has.
#pragma once

#include <functional>
#include <string>

#include "godwit/serve/api_error.h"

namespace godwit::serve {

// A JSON object without a key twice. Throws ApiError 400 that says where it is not one, and ClientGone when
// `gone` says so, which is asked now and then.
Json parse_object(const std::string& body, const std::function<bool()>& gone = {});

// JSON in a text (the arguments of a call), which is parsed later: the same limits, but keys may come twice.
void check_json_text(const std::string& text, const std::string& param);

enum class Call { kChat, kCompletion, kTokenize, kDetokenize };

// Throws ApiError 400 for a key that the call does not have, and for one whose value would change the answer
// in a way that this server does not support. What means nothing here (`user`, `metadata`, ...) passes.
void check_keys(const Json& request, Call call);

// The same for the keys of each message of a chat.
void check_message_keys(const Json& messages);

}  // namespace godwit::serve
