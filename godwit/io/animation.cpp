// WebP through libwebpdemux. PNG (the APNG extension): every frame is made a PNG file of its own from the
// chunks of the animation, decoded as any other, and laid over the canvas.
#include "godwit/io/animation.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/io/image_decoders.h"
#include "godwit/io/image_resize.h"

#if GODWIT_WITH_PNG
#include <png.h>
#endif
#if GODWIT_WITH_WEBPDEMUX
#include <webp/demux.h>
#endif

namespace godwit::io {
namespace {

constexpr std::string_view kPngMagic = "\x89PNG\r\n\x1A\n";

// One chunk of a PNG file.
struct Chunk {
  std::string_view type, body;
};

uint32_t big_endian(std::string_view bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

std::string big_endian(uint32_t value) {
  std::string out(4, '\0');
  for (int i = 0; i < 4; ++i) out[i] = static_cast<char>(value >> (24 - 8 * i) & 0xFF);
  return out;
}

std::vector<Chunk> chunks_of(std::string_view file, const std::string& where) {
  std::vector<Chunk> chunks;
  for (size_t at = kPngMagic.size(); at < file.size();) {
    check(file.size() - at >= 12, "{}: damaged PNG: a chunk ends too early", where);
    const uint32_t size = big_endian(file.substr(at, 4));
    check(size <= file.size() - at - 12, "{}: damaged PNG: a chunk ends too early", where);
    chunks.push_back({file.substr(at + 4, 4), file.substr(at + 8, size)});
    at += 12 + size;
    if (chunks.back().type == "IEND") break;
  }
  return chunks;
}

uint32_t crc(std::string_view bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t n = 0; n < 256; ++n) {
      uint32_t c = n;
      for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      t[n] = c;
    }
    return t;
  }();
  uint32_t c = 0xFFFFFFFFu;
  for (const char byte : bytes) c = table[(c ^ static_cast<unsigned char>(byte)) & 0xFF] ^ (c >> 8);
  return ~c;
}

void append_chunk(std::string& file, std::string_view type, std::string_view body) {
  const std::string whole = std::string(type) + std::string(body);
  file += big_endian(static_cast<uint32_t>(body.size())) + whole + big_endian(crc(whole));
}

// fcTL: where a frame lies, and what becomes of its place.
struct FrameControl {
  int64_t width = 0, height = 0, x = 0, y = 0;
  int dispose = 0;  // 0 leaves it, 1 clears it, 2 brings back what was there
  int blend = 0;    // 0 replaces, 1 lies over
};

FrameControl read_control(std::string_view body, const Image& canvas, const std::string& where) {
  check(body.size() == 26, "{}: damaged PNG: a frame's header has {} bytes", where, body.size());
  FrameControl c{.width = big_endian(body.substr(4)),
                 .height = big_endian(body.substr(8)),
                 .x = big_endian(body.substr(12)),
                 .y = big_endian(body.substr(16)),
                 .dispose = body[24],
                 .blend = body[25]};
  check(c.width > 0 && c.height > 0 && c.x + c.width <= canvas.width && c.y + c.height <= canvas.height,
        "{}: damaged PNG: a frame of {} x {} at {}, {} on a canvas of {} x {}", where, c.width, c.height, c.x,
        c.y, canvas.width, canvas.height);
  return c;
}

// `over`: composited by alpha; else replaced.
void lay(const Image& frame, const FrameControl& c, Image& canvas) {
  for (int64_t y = 0; y < c.height; ++y) {
    for (int64_t x = 0; x < c.width; ++x) {
      const uint8_t* from = &frame.pixels[(y * c.width + x) * 4];
      uint8_t* to = &canvas.pixels[((c.y + y) * canvas.width + c.x + x) * 4];
      if (c.blend == 0 || from[3] == 255 || to[3] == 0) {
        std::copy_n(from, 4, to);
      } else if (from[3] > 0) {
        const int a = from[3], keep = to[3] * (255 - a) / 255, all = a + keep;
        for (int i = 0; i < 3; ++i) to[i] = static_cast<uint8_t>((from[i] * a + to[i] * keep) / all);
        to[3] = static_cast<uint8_t>(all);
      }
    }
  }
}

void clear(const FrameControl& c, Image& canvas) {
  for (int64_t y = c.y; y < c.y + c.height; ++y)
    std::fill_n(&canvas.pixels[(y * canvas.width + c.x) * 4], c.width * 4, uint8_t{0});
}

Image blank(int64_t width, int64_t height, const std::string& where, const ImageLimits& limits) {
  check_image_size(width, height, {.file = {}, .where = where, .limits = limits});
  Image out{.width = width, .height = height, .mode = ImageMode::kRgba};
  out.pixels.assign(static_cast<size_t>(width * height * 4), 0);
  return out;
}

Image as_rgba(const Image& image) {
  Image full = to_rgb_or_rgba(image);
  if (full.mode == ImageMode::kRgba) return full;
  Image out{.width = full.width, .height = full.height, .mode = ImageMode::kRgba};
  out.pixels.resize(static_cast<size_t>(full.width * full.height * 4), 255);
  for (int64_t i = 0; i < full.width * full.height; ++i)
    std::copy_n(&full.pixels[i * 3], 3, &out.pixels[i * 4]);
  return out;
}

}  // namespace

bool is_animated_png(std::string_view file) {
  // acTL stands before the first image data, near the beginning.
  return file.starts_with(kPngMagic) && file.substr(0, 4096).find("acTL") != std::string_view::npos;
}

bool is_animated_webp(std::string_view file) {
  return file.size() >= 21 && file.starts_with("RIFF") && file.substr(8, 8) == "WEBPVP8X" &&
         (file[20] & 2) != 0;
}

void decode_animated_png(std::string_view file, const std::string& where, const ImageLimits& limits,
                         const FrameFn& visit) {
  const std::vector<Chunk> chunks = chunks_of(file, where);
  check(!chunks.empty() && chunks[0].type == "IHDR" && chunks[0].body.size() == 13,
        "{}: damaged PNG: the header is not valid", where);
  const std::string header(chunks[0].body);
  Image canvas = blank(big_endian(header), big_endian(std::string_view(header).substr(4)), where, limits);
  std::string shared;  // palettes and the like, before any image data
  std::string data;    // of the frame that is being collected
  std::optional<FrameControl> control;
  const auto finish_frame = [&] {
    if (!control || data.empty()) return;
    std::string one(kPngMagic);
    append_chunk(one, "IHDR",
                 big_endian(static_cast<uint32_t>(control->width)) +
                     big_endian(static_cast<uint32_t>(control->height)) + header.substr(8));
    one += shared;
    append_chunk(one, "IDAT", data);
    append_chunk(one, "IEND", {});
    const Image frame = as_rgba(decode_image(as_bytes(one), where, limits));
    const Image before = control->dispose == 2 ? canvas : Image{};
    lay(frame, *control, canvas);
    visit(canvas);
    if (control->dispose == 1) clear(*control, canvas);
    if (control->dispose == 2) canvas = before;
    data.clear();
  };
  bool begun = false;  // image data have come
  for (const Chunk& chunk : chunks) {
    if (chunk.type == "fcTL") {
      finish_frame();
      control = read_control(chunk.body, canvas, where);
    } else if (chunk.type == "IDAT") {
      begun = true;
      if (control)
        data += chunk.body;  // without a control before it: a still that is no part of the animation
    } else if (chunk.type == "fdAT") {
      check(chunk.body.size() >= 4 && control, "{}: damaged PNG: frame data without a frame", where);
      data += chunk.body.substr(4);
    } else if (!begun && (chunk.type == "PLTE" || chunk.type == "tRNS" || chunk.type == "gAMA")) {
      append_chunk(shared, chunk.type, chunk.body);
    }
  }
  finish_frame();
}

#if GODWIT_WITH_WEBPDEMUX

void decode_animated_webp(std::string_view file, const std::string& where, const ImageLimits& limits,
                          const FrameFn& visit) {
  const WebPData data{reinterpret_cast<const uint8_t*>(file.data()), file.size()};
  WebPDemuxer* demuxer = WebPDemux(&data);
  check(demuxer != nullptr, "{}: damaged WebP: the data are truncated or not valid", where);
  const int64_t width = WebPDemuxGetI(demuxer, WEBP_FF_CANVAS_WIDTH);
  const int64_t height = WebPDemuxGetI(demuxer, WEBP_FF_CANVAS_HEIGHT);
  WebPDemuxDelete(demuxer);
  Image canvas = blank(width, height, where, limits);
  struct Decoder {
    WebPAnimDecoder* at;
    ~Decoder() { WebPAnimDecoderDelete(at); }
  } decoder{WebPAnimDecoderNew(&data, nullptr)};
  check(decoder.at != nullptr, "{}: damaged WebP: the animation is not valid", where);
  while (WebPAnimDecoderHasMoreFrames(decoder.at)) {
    uint8_t* pixels = nullptr;
    int time = 0;
    check(WebPAnimDecoderGetNext(decoder.at, &pixels, &time),
          "{}: damaged WebP: a frame is truncated or not valid", where);
    std::copy_n(pixels, canvas.pixels.size(), canvas.pixels.begin());
    visit(canvas);
  }
}

#else

void decode_animated_webp(std::string_view, const std::string& where, const ImageLimits&, const FrameFn&) {
  fail("{}: this build has no libwebpdemux: animated WebP cannot be read", where);
}

#endif

#if GODWIT_WITH_PNG

std::string encode_png(const Image& image) {
  const bool alpha = image.mode == ImageMode::kRgba;
  check(alpha || image.mode == ImageMode::kRgb, "encode_png: expected RGB or RGBA");
  png_image png = {};
  png.version = PNG_IMAGE_VERSION;
  png.width = static_cast<png_uint_32>(image.width);
  png.height = static_cast<png_uint_32>(image.height);
  png.format = alpha ? PNG_FORMAT_RGBA : PNG_FORMAT_RGB;
  png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(png);
  std::string out(size, '\0');
  check(png_image_write_to_memory(&png, out.data(), &size, /*convert_to_8_bit=*/0, image.pixels.data(),
                                  /*row_stride=*/0, /*colormap=*/nullptr) != 0,
        "encode_png: {}", png.message);
  out.resize(size);
  return out;
}

#else

std::string encode_png(const Image&) {
  fail("this build has no libpng: frames cannot be kept");
}

#endif

}  // namespace godwit::io
