// The bytes behind the image_url of a chat message. Nothing is fetched: a picture comes in the request itself
// (a data URL), or from a directory that the server was told about.
#pragma once

#include <string>

namespace godwit::serve {

// "data:image/png;base64,...", or, where `directory` is not empty, "file:NAME" of a file below it (also
// file:///ABSOLUTE). The URL is not quoted in errors: it may be long. Throws ApiError 400 that begins with
// `where`.
std::string image_bytes(const std::string& url, const std::string& where, const std::string& directory);

}  // namespace godwit::serve
