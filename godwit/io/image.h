// Pictures from JPEG, PNG and WebP files, as they are stored: no rotation by EXIF, no colour management, the
// first picture of the file. 16-bit samples keep their upper byte.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"

namespace godwit::io {

enum class ImageMode { kGray, kGrayAlpha, kRgb, kRgba, kCmyk };  // kCmyk: 255 = full ink

struct Image {
  int64_t width = 0;
  int64_t height = 0;
  ImageMode mode = ImageMode::kRgb;
  std::vector<uint8_t> pixels = {};  // [height, width, channels()]
  // From a palette or one bit a pixel: values between two of the picture's own would mean nothing, so it is
  // resized by nearest neighbour. The pixels are expanded (kRgb, kRgba or kGray).
  bool indexed = false;
  // kGray (first entry) and kRgb: pixels of exactly this value are transparent.
  std::optional<std::array<uint8_t, 3>> transparent = {};

  int64_t channels() const;
  bool has_alpha() const {
    return mode == ImageMode::kGrayAlpha || mode == ImageMode::kRgba || transparent.has_value();
  }
};

// Checked against the header, before memory for pixels is taken.
struct ImageLimits {
  int64_t max_pixels = 89'478'485;  // 256 MiB of RGB
  int64_t max_side = 65'535;
};

// What the header says.
struct ImageInfo {
  std::string format;  // "jpeg", "png", "webp"
  int64_t width = 0;
  int64_t height = 0;
};

// `where` names the file in errors. Refused with one clear line: not one of the three formats, truncated or
// damaged data, an empty picture, more pixels than the limit, an animated WebP, a format that this build has
// no library for.
Image decode_image(Bytes file, const std::string& where, const ImageLimits& limits = {});
Image load_image(const fs::path& path, const ImageLimits& limits = {});
ImageInfo image_info(Bytes file, const std::string& where, const ImageLimits& limits = {});

}  // namespace godwit::io
