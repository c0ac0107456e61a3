// One decoder a format, for image.cpp. Each checks the header against the limits first; `pixels` false stops
// there.
#pragma once

#include <string>

#include "godwit/io/image.h"

namespace godwit::io {

struct DecodeRequest {
  Bytes file;
  const std::string& where;
  const ImageLimits& limits;
  bool pixels = true;
};

Image decode_jpeg(const DecodeRequest& request);
Image decode_png(const DecodeRequest& request);
Image decode_webp(const DecodeRequest& request);

void check_image_size(int64_t width, int64_t height, const DecodeRequest& request);

}  // namespace godwit::io
