// PNG through libpng. Its errors leave by longjmp: nothing with a destructor may live between setjmp and the
// calls that can fail, so each of the two steps is a function of plain data.
#include "godwit/base/check.h"
#include "godwit/io/image_decoders.h"

#if GODWIT_WITH_PNG
#include <png.h>

#include <algorithm>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#endif

namespace godwit::io {

#if GODWIT_WITH_PNG
namespace {

struct Decoder {
  png_structp png = nullptr;
  png_infop info = nullptr;
  Bytes rest;
  char message[256] = {};
  // From the header.
  png_uint_32 width = 0, height = 0;
  int depth = 0, colour = 0;
  bool has_key = false;
  png_color_16 key = {};

  ~Decoder() { png_destroy_read_struct(&png, &info, nullptr); }
};

void on_error(png_structp png, png_const_charp message) {
  auto* d = static_cast<Decoder*>(png_get_error_ptr(png));
  std::snprintf(d->message, sizeof(d->message), "%s", message);
  png_longjmp(png, 1);
}

void on_warning(png_structp, png_const_charp) {}

void on_read(png_structp png, png_bytep out, size_t size) {
  auto* d = static_cast<Decoder*>(png_get_io_ptr(png));
  if (size > d->rest.size()) png_error(png, "the file ends too early");
  std::memcpy(out, d->rest.data(), size);
  d->rest = d->rest.subspan(size);
}

bool read_header(Decoder& d) {
  if (setjmp(png_jmpbuf(d.png))) return false;
  png_set_read_fn(d.png, &d, on_read);
  png_set_chunk_malloc_max(d.png, 1 << 23);  // texts and profiles that we do not use
  png_set_chunk_cache_max(d.png, 64);
  png_set_user_limits(d.png, 0x7fffffff, 0x7fffffff);  // ours come right after, with their own words
  png_read_info(d.png, d.info);
  png_get_IHDR(d.png, d.info, &d.width, &d.height, &d.depth, &d.colour, nullptr, nullptr, nullptr);
  return true;
}

// `rows` has room for width * height * channels bytes after the transformations asked for here.
bool read_pixels(Decoder& d, unsigned char* pixels, size_t stride) {
  if (setjmp(png_jmpbuf(d.png))) return false;
  const int passes = png_set_interlace_handling(d.png);
  png_read_update_info(d.png, d.info);
  if (png_get_rowbytes(d.png, d.info) != stride) png_error(d.png, "rows of an unexpected size");
  for (int pass = 0; pass < passes; ++pass) {
    for (png_uint_32 y = 0; y < d.height; ++y) png_read_row(d.png, pixels + y * stride, nullptr);
  }
  png_read_end(d.png, nullptr);
  return true;
}

// Asks for 8-bit samples in the image's own mode, and gives that mode.
ImageMode choose_mode(Decoder& d, bool& indexed) {
  if (d.depth == 16) png_set_strip_16(d.png);
  const bool transparency = png_get_valid(d.png, d.info, PNG_INFO_tRNS) != 0;
  switch (d.colour) {
    case PNG_COLOR_TYPE_PALETTE:
      indexed = true;
      png_set_palette_to_rgb(d.png);
      if (transparency) png_set_tRNS_to_alpha(d.png);
      return transparency ? ImageMode::kRgba : ImageMode::kRgb;
    case PNG_COLOR_TYPE_GRAY:
      indexed = d.depth == 1;
      png_set_expand_gray_1_2_4_to_8(d.png);
      break;
    case PNG_COLOR_TYPE_GRAY_ALPHA:
      return ImageMode::kGrayAlpha;
    case PNG_COLOR_TYPE_RGB_ALPHA:
      return ImageMode::kRgba;
    default:
      break;
  }
  if (transparency && d.depth == 16) {  // compared at full depth, before the lower bytes go
    png_set_tRNS_to_alpha(d.png);
    return d.colour == PNG_COLOR_TYPE_GRAY ? ImageMode::kGrayAlpha : ImageMode::kRgba;
  }
  png_color_16p key = nullptr;
  if (transparency && png_get_tRNS(d.png, d.info, nullptr, nullptr, &key) && key) {
    d.has_key = true;
    d.key = *key;
  }
  return d.colour == PNG_COLOR_TYPE_GRAY ? ImageMode::kGray : ImageMode::kRgb;
}

// A sample of at most eight bits, spread over 0 to 255.
uint8_t to_8_bits(int value, int depth) {
  return static_cast<uint8_t>(value * 255 / ((1 << depth) - 1));
}

}  // namespace

Image decode_png(const DecodeRequest& request) {
  Decoder d;
  d.rest = request.file;
  d.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &d, on_error, on_warning);
  if (d.png) d.info = png_create_info_struct(d.png);
  check(d.png && d.info, "{}: libpng cannot start", request.where);
  if (!read_header(d)) fail("{}: damaged PNG: {}", request.where, d.message);
  check_image_size(d.width, d.height, request);
  Image image{.width = d.width, .height = d.height};
  image.mode = choose_mode(d, image.indexed);
  if (d.has_key) {
    image.transparent = {to_8_bits(image.mode == ImageMode::kGray ? d.key.gray : d.key.red, d.depth),
                         to_8_bits(d.key.green, d.depth), to_8_bits(d.key.blue, d.depth)};
  }
  if (!request.pixels) return image;
  const auto stride = static_cast<size_t>(image.width * image.channels());
  image.pixels.resize(stride * static_cast<size_t>(image.height));
  if (!read_pixels(d, image.pixels.data(), stride)) fail("{}: damaged PNG: {}", request.where, d.message);
  return image;
}

#else

Image decode_png(const DecodeRequest& request) {
  fail("{}: this build has no libpng: PNG images cannot be read", request.where);
}

#endif

}  // namespace godwit::io
