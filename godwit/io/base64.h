// Base64 (RFC 4648) and the data URLs that carry pictures in JSON.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace godwit::io {

// White space is passed over, the padding at the end may be missing. Anything else that is not base64 is an
// Error that begins with `where`.
std::string decode_base64(std::string_view text, const std::string& where);

std::string encode_base64(std::string_view bytes);

// The bytes of "data:[TYPE][;...];base64,..."; nothing if `url` is no data URL. One without ";base64" is an
// Error.
std::optional<std::string> decode_data_url(std::string_view url, const std::string& where);

}  // namespace godwit::io
