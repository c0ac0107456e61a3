// Animated WebP and PNG, frame by frame as whole canvases in RGBA.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "godwit/io/image.h"

namespace godwit::io {

using FrameFn = std::function<void(const Image& canvas)>;

bool is_animated_webp(std::string_view file);
bool is_animated_png(std::string_view file);

// Damaged files are Errors that begin with `where`, as are canvases beyond the limits.
void decode_animated_webp(std::string_view file, const std::string& where, const ImageLimits& limits,
                          const FrameFn& visit);
void decode_animated_png(std::string_view file, const std::string& where, const ImageLimits& limits,
                         const FrameFn& visit);

// An RGB or RGBA picture as a PNG file.
std::string encode_png(const Image& image);

}  // namespace godwit::io
