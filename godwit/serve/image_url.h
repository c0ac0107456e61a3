// The bytes behind the image_url of a chat message. Nothing is fetched: a picture comes in the request itself
// (a data URL), or from a directory that the server was told about.
#pragma once

#include <string>
#include <string_view>

namespace godwit::serve {

// "data:image/png;base64,...", or, where `directory` is not empty, "file:NAME" of a file below it (also
// file:///ABSOLUTE). The URL is not quoted in errors: it may be long. Throws ApiError 400 that begins with
// `where`.
std::string image_bytes(const std::string& url, const std::string& where, const std::string& directory);

// Base64 with padding or without, line breaks aside; false if it is something else.
bool decode_base64(std::string_view text, std::string& out);

}  // namespace godwit::serve
