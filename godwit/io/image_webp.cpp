// WebP through libwebp.
#include "godwit/base/check.h"
#include "godwit/io/image_decoders.h"

#if GODWIT_WITH_WEBP
#include <webp/decode.h>
#endif

namespace godwit::io {

#if GODWIT_WITH_WEBP

Image decode_webp(const DecodeRequest& request) {
  const auto* data = reinterpret_cast<const uint8_t*>(request.file.data());
  WebPBitstreamFeatures features = {};
  const VP8StatusCode status = WebPGetFeatures(data, request.file.size(), &features);
  check(status == VP8_STATUS_OK, "{}: damaged WebP: the header {}", request.where,
        status == VP8_STATUS_NOT_ENOUGH_DATA ? "ends too early" : "is not valid");
  check(!features.has_animation, "{}: an animated WebP is not a still image", request.where);
  check_image_size(features.width, features.height, request);
  Image image{.width = features.width, .height = features.height};
  image.mode = features.has_alpha ? ImageMode::kRgba : ImageMode::kRgb;
  if (!request.pixels) return image;
  const auto stride = static_cast<size_t>(image.width * image.channels());
  image.pixels.resize(stride * static_cast<size_t>(image.height));
  const auto decode = features.has_alpha ? WebPDecodeRGBAInto : WebPDecodeRGBInto;
  check(decode(data, request.file.size(), image.pixels.data(), image.pixels.size(), static_cast<int>(stride)),
        "{}: damaged WebP: the data are truncated or not valid", request.where);
  return image;
}

#else

Image decode_webp(const DecodeRequest& request) {
  fail("{}: this build has no libwebp: WebP images cannot be read", request.where);
}

#endif

}  // namespace godwit::io
