// What goes back to a client whose request cannot be served, in OpenAI's shape.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "godwit/base/check.h"

namespace godwit::serve {

using Json = nlohmann::ordered_json;

// The message goes to the client. `param` is the path of the key that is to blame ("messages[0].role"),
// `code` OpenAI's word for what clients tell apart ("context_length_exceeded"); both may be empty.
class ApiError : public Error {
 public:
  ApiError(int status, const std::string& message, std::string param = {}, std::string code = {})
      : Error(message), status_(status), param_(std::move(param)), code_(std::move(code)) {}
  int status() const { return status_; }
  const std::string& param() const { return param_; }
  const std::string& code() const { return code_; }

 private:
  int status_;
  std::string param_, code_;
};

// {"error": {"message", "type", "param", "code"}}
std::string error_body(int status, std::string_view message, const std::string& param = {},
                       const std::string& code = {});

// The path that an error's message begins with ("messages[0].role: expected ..."), or `fallback`.
std::string param_of(std::string_view message, std::string_view fallback);

// Runs `action`; its errors are the client's.
template <class F>
auto client_error(const char* fallback, F&& action) {
  try {
    return action();
  } catch (const ApiError&) {
    throw;
  } catch (const Error& e) {
    throw ApiError(400, e.what(), param_of(e.what(), fallback));
  }
}

// Valid UTF-8 whatever the strings hold.
std::string to_text(const Json& json);

}  // namespace godwit::serve
