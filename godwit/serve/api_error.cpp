#include "godwit/serve/api_error.h"

#include <cctype>

namespace godwit::serve {
namespace {

constexpr size_t kLongestMessage = 1000, kLongestParam = 200;  // a client's own words may be of any length

std::string shortened(std::string_view text, size_t most) {
  return std::string(text.substr(0, most)) + (text.size() > most ? "..." : "");
}

}  // namespace

std::string to_text(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

std::string error_body(int status, std::string_view message, const std::string& param,
                       const std::string& code) {
  const char* type = status == 401   ? "authentication_error"
                     : status == 403 ? "permission_error"
                     : status == 404 ? "not_found_error"
                     : status == 429 ? "rate_limit_error"
                     : status < 500  ? "invalid_request_error"
                                     : "server_error";
  const auto or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  return to_text({{"error",
                   {{"message", shortened(message, kLongestMessage)},
                    {"type", type},
                    {"param", or_null(shortened(param, kLongestParam))},
                    {"code", or_null(code)}}}});
}

std::string param_of(std::string_view message, std::string_view fallback) {
  const std::string_view path = message.substr(0, message.find(": "));
  bool good = path.size() < message.size() && !path.empty() && path[0] >= 'a' && path[0] <= 'z';
  for (const char c : path)
    good = good && (std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_' || c == '.' || c == '[' ||
                    c == ']' || c == '-');
  return std::string(good ? path : fallback);
}

}  // namespace godwit::serve
