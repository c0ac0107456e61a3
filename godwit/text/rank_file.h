// tiktoken's vocabulary format: one line a token, `base64(bytes) rank`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace godwit {

// Tokens in rank order. Ranks must be 0..n-1 in any order of lines, tokens distinct, and every single byte a
// token, so that any text can be encoded. Throws Error with `name` and the line of the first fault.
std::vector<std::string> parse_ranks(std::string_view content, const std::string& name);

std::string format_ranks(const std::vector<std::string>& tokens);

}  // namespace godwit
