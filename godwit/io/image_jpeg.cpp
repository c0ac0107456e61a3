// JPEG through libjpeg-turbo. Its errors leave by longjmp: nothing with a destructor may live between setjmp
// and the calls that can fail, so the decoding loop is a function of plain data.
#include "godwit/base/check.h"
#include "godwit/io/image_decoders.h"

#if GODWIT_WITH_JPEG
// jpeglib.h needs these before it.
#include <cstddef>
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <csetjmp>
#endif

namespace godwit::io {

#if GODWIT_WITH_JPEG
namespace {

constexpr int kMostScans = 200;  // a progressive file of a few bytes a scan could otherwise keep us busy

struct Failure {
  jpeg_error_mgr base;  // first, so that the library's pointer is ours
  jmp_buf jump;
  char message[JMSG_LENGTH_MAX];
};

[[noreturn]] void leave(j_common_ptr info) {
  auto* failure = reinterpret_cast<Failure*>(info->err);
  failure->base.format_message(info, failure->message);
  longjmp(failure->jump, 1);
}

// Most warnings are harmless oddities. Where data are missing or damaged the library goes on with invented
// pixels; we do not.
void on_message(j_common_ptr info, int level) {
  const int code = info->err->msg_code;
  if (level < 0 && (code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER || code == JWRN_HUFF_BAD_CODE))
    leave(info);
}

// Plain data across setjmp.
struct Decoder {
  jpeg_decompress_struct info = {};
  Failure failure = {};
  bool created = false;
};

bool read_header(Decoder& d, const unsigned char* data, unsigned long size) {
  if (setjmp(d.failure.jump)) return false;
  jpeg_create_decompress(&d.info);
  d.created = true;
  jpeg_mem_src(&d.info, data, size);
  jpeg_read_header(&d.info, TRUE);
  return true;
}

// Only after read_header. `out` holds rows of `stride` bytes.
bool read_pixels(Decoder& d, unsigned char* out, size_t stride) {
  if (setjmp(d.failure.jump)) return false;
  jpeg_start_decompress(&d.info);
  while (d.info.output_scanline < d.info.output_height) {
    JSAMPROW row = out + static_cast<size_t>(d.info.output_scanline) * stride;
    jpeg_read_scanlines(&d.info, &row, 1);
  }
  jpeg_finish_decompress(&d.info);
  return true;
}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMostScans) {
    std::snprintf(reinterpret_cast<Failure*>(info->err)->message, JMSG_LENGTH_MAX, "more than %d scans",
                  kMostScans);
    longjmp(reinterpret_cast<Failure*>(info->err)->jump, 1);
  }
}

ImageMode choose_mode(jpeg_decompress_struct& info) {
  switch (info.jpeg_color_space) {
    case JCS_GRAYSCALE:
      info.out_color_space = JCS_GRAYSCALE;
      return ImageMode::kGray;
    case JCS_CMYK:
    case JCS_YCCK:
      info.out_color_space = JCS_CMYK;
      return ImageMode::kCmyk;
    default:
      info.out_color_space = JCS_RGB;
      return ImageMode::kRgb;
  }
}

}  // namespace

Image decode_jpeg(const DecodeRequest& request) {
  Decoder d;
  d.info.err = jpeg_std_error(&d.failure.base);
  d.failure.base.error_exit = leave;
  d.failure.base.emit_message = on_message;
  jpeg_progress_mgr progress = {};
  progress.progress_monitor = on_progress;
  struct Destroy {
    Decoder& d;
    ~Destroy() {
      if (d.created) jpeg_destroy_decompress(&d.info);
    }
  } destroy{d};

  const auto* data = reinterpret_cast<const unsigned char*>(request.file.data());
  if (!read_header(d, data, request.file.size()))
    fail("{}: damaged JPEG: {}", request.where, d.failure.message);
  Image image{.width = d.info.image_width, .height = d.info.image_height};
  check_image_size(image.width, image.height, request);
  image.mode = choose_mode(d.info);
  if (!request.pixels) return image;
  d.info.progress = &progress;
  const auto stride = static_cast<size_t>(image.width * image.channels());
  image.pixels.resize(stride * static_cast<size_t>(image.height));
  if (!read_pixels(d, image.pixels.data(), stride))
    fail("{}: damaged JPEG: {}", request.where, d.failure.message);
  if (image.mode == ImageMode::kCmyk) {  // Adobe's convention, which files of this kind follow: 0 = full ink
    for (uint8_t& value : image.pixels) value = 255 - value;
  }
  return image;
}

#else

Image decode_jpeg(const DecodeRequest& request) {
  fail("{}: this build has no libjpeg: JPEG images cannot be read", request.where);
}

#endif

}  // namespace godwit::io
