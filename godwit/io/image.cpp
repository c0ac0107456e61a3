#include "godwit/io/image.h"

#include <algorithm>

#include "godwit/base/check.h"
#include "godwit/io/image_decoders.h"

namespace godwit::io {
namespace {

enum class Format { kJpeg, kPng, kWebp };
constexpr const char* kFormatNames[] = {"jpeg", "png", "webp"};

// By content: a wrong file name extension does not matter.
Format format_of(Bytes file, const std::string& where) {
  const std::string_view text = as_text(file);
  check(!text.empty(), "{}: an empty file", where);
  if (text.starts_with("\xFF\xD8\xFF")) return Format::kJpeg;
  if (text.starts_with("\x89PNG\r\n\x1A\n")) return Format::kPng;
  if (text.starts_with("RIFF") && text.size() >= 12 && text.substr(8, 4) == "WEBP") return Format::kWebp;
  fail("{}: not a JPEG, PNG or WebP image", where);
}

Image decode(Format format, const DecodeRequest& request) {
  switch (format) {
    case Format::kJpeg:
      return decode_jpeg(request);
    case Format::kPng:
      return decode_png(request);
    case Format::kWebp:
      return decode_webp(request);
  }
  fail("{}: unknown format", request.where);
}

}  // namespace

int64_t Image::channels() const {
  constexpr int64_t kChannels[] = {1, 2, 3, 4, 4};
  return kChannels[static_cast<int>(mode)];
}

void check_image_size(int64_t width, int64_t height, const DecodeRequest& request) {
  const ImageLimits& limits = request.limits;
  check(width > 0 && height > 0, "{}: the image has no pixels ({} x {})", request.where, width, height);
  check(std::max(width, height) <= limits.max_side && width <= limits.max_pixels / height,
        "{}: {} x {} pixels are too many: at most {} in all and {} on a side", request.where, width, height,
        limits.max_pixels, limits.max_side);
}

Image decode_image(Bytes file, const std::string& where, const ImageLimits& limits) {
  return decode(format_of(file, where), {.file = file, .where = where, .limits = limits});
}

Image load_image(const fs::path& path, const ImageLimits& limits) {
  const MappedFile file(path);
  return decode_image(file.bytes(), path.string(), limits);
}

ImageInfo image_info(Bytes file, const std::string& where, const ImageLimits& limits) {
  const Format format = format_of(file, where);
  const Image header = decode(format, {.file = file, .where = where, .limits = limits, .pixels = false});
  return {.format = kFormatNames[static_cast<int>(format)], .width = header.width, .height = header.height};
}

}  // namespace godwit::io
