#include "godwit/io/image_resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"

namespace godwit::io {
namespace {

constexpr int kPrecision = 32 - 8 - 2;  // bits behind the point: eight for the pixel, two for the overshoot

double bicubic(double x) {
  constexpr double a = -0.5;
  x = std::fabs(x);
  if (x < 1.0) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * a;
  return 0.0;
}

// For each place of the output: the inputs it reads, [first, first + count), and their weights.
struct Taps {
  int64_t width = 0;  // room for each place's weights
  std::vector<int64_t> first = {}, count = {};
  std::vector<int32_t> weights = {};
};

Taps make_taps(int64_t in, int64_t out) {
  const double scale = static_cast<double>(in) / static_cast<double>(out);
  const double filter_scale = std::max(scale, 1.0);
  const double support = 2.0 * filter_scale;
  Taps taps{.width = static_cast<int64_t>(std::ceil(support)) * 2 + 1};
  taps.weights.resize(static_cast<size_t>(out * taps.width));
  std::vector<double> w(static_cast<size_t>(taps.width));
  for (int64_t x = 0; x < out; ++x) {
    const double center = (static_cast<double>(x) + 0.5) * scale;
    const double inverse = 1.0 / filter_scale;
    const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const int64_t count = std::min<int64_t>(in, static_cast<int64_t>(center + support + 0.5)) - first;
    double sum = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      w[i] = bicubic((static_cast<double>(i + first) - center + 0.5) * inverse);
      sum += w[i];
    }
    for (int64_t i = 0; i < count; ++i) {
      const double value = (sum != 0.0 ? w[i] / sum : w[i]) * (1 << kPrecision);
      taps.weights[x * taps.width + i] = static_cast<int32_t>(value < 0 ? value - 0.5 : value + 0.5);
    }
    taps.first.push_back(first);
    taps.count.push_back(count);
  }
  return taps;
}

uint8_t clip8(int32_t sum) {
  return static_cast<uint8_t>(std::clamp(sum >> kPrecision, 0, 255));
}

// [rows, in, C] -> [rows, out, C]
std::vector<uint8_t> resize_rows(const std::vector<uint8_t>& from, int64_t rows, int64_t in, int64_t out,
                                 int64_t C) {
  const Taps taps = make_taps(in, out);
  std::vector<uint8_t> to(static_cast<size_t>(rows * out * C));
  parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t y = begin; y < end; ++y) {
      for (int64_t x = 0; x < out; ++x) {
        const int32_t* w = &taps.weights[x * taps.width];
        const uint8_t* source = &from[(y * in + taps.first[x]) * C];
        for (int64_t c = 0; c < C; ++c) {
          int32_t sum = 1 << (kPrecision - 1);
          for (int64_t i = 0; i < taps.count[x]; ++i) sum += source[i * C + c] * w[i];
          to[(y * out + x) * C + c] = clip8(sum);
        }
      }
    }
  });
  return to;
}

// [in, row] -> [out, row], `row` values a row
std::vector<uint8_t> resize_columns(const std::vector<uint8_t>& from, int64_t in, int64_t out, int64_t row) {
  const Taps taps = make_taps(in, out);
  std::vector<uint8_t> to(static_cast<size_t>(out * row));
  parallel_for(0, out, 16, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> sums(static_cast<size_t>(row));
    for (int64_t y = begin; y < end; ++y) {
      std::ranges::fill(sums, 1 << (kPrecision - 1));
      for (int64_t i = 0; i < taps.count[y]; ++i) {
        const int32_t w = taps.weights[y * taps.width + i];
        const uint8_t* source = &from[(taps.first[y] + i) * row];
        for (int64_t x = 0; x < row; ++x) sums[x] += source[x] * w;
      }
      for (int64_t x = 0; x < row; ++x) to[y * row + x] = clip8(sums[x]);
    }
  });
  return to;
}

// Where each place of the output reads; Pillow adds the step up, rounding included.
std::vector<int64_t> nearest(int64_t in, int64_t out) {
  const double step = static_cast<double>(in) / static_cast<double>(out);
  std::vector<int64_t> from;
  double at = step * 0.5;
  for (int64_t x = 0; x < out; ++x, at += step) from.push_back(std::min(static_cast<int64_t>(at), in - 1));
  return from;
}

std::vector<uint8_t> resize_nearest(const Image& image, int64_t width, int64_t height) {
  const int64_t C = image.channels();
  const std::vector<int64_t> xs = nearest(image.width, width), ys = nearest(image.height, height);
  std::vector<uint8_t> to(static_cast<size_t>(width * height * C));
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x)
      std::memcpy(&to[(y * width + x) * C], &image.pixels[(ys[y] * image.width + xs[x]) * C], C);
  }
  return to;
}

uint8_t mul_div_255(int a, int b) {
  const int t = a * b + 128;
  return static_cast<uint8_t>((t + (t >> 8)) >> 8);
}

// The last of C channels is alpha.
void premultiply(std::vector<uint8_t>& pixels, int64_t C) {
  for (size_t i = 0; i < pixels.size(); i += C) {
    const int alpha = pixels[i + C - 1];
    for (int64_t c = 0; c < C - 1; ++c) pixels[i + c] = mul_div_255(pixels[i + c], alpha);
  }
}

void unpremultiply(std::vector<uint8_t>& pixels, int64_t C) {
  for (size_t i = 0; i < pixels.size(); i += C) {
    const int alpha = pixels[i + C - 1];
    if (alpha == 0 || alpha == 255) continue;
    for (int64_t c = 0; c < C - 1; ++c)
      pixels[i + c] = static_cast<uint8_t>(std::min(255, 255 * pixels[i + c] / alpha));
  }
}

}  // namespace

Image resize_image(const Image& image, int64_t width, int64_t height) {
  check(width > 0 && height > 0, "an image cannot be resized to {} x {}", width, height);
  Image out = image;
  if (width == image.width && height == image.height) return out;
  out.width = width;
  out.height = height;
  if (image.indexed) {
    out.pixels = resize_nearest(image, width, height);
    return out;
  }
  const int64_t C = image.channels();
  const bool alpha = image.mode == ImageMode::kGrayAlpha || image.mode == ImageMode::kRgba;
  if (alpha) premultiply(out.pixels, C);
  if (width != image.width) out.pixels = resize_rows(out.pixels, image.height, image.width, width, C);
  if (height != image.height) out.pixels = resize_columns(out.pixels, image.height, height, width * C);
  if (alpha) unpremultiply(out.pixels, C);
  return out;
}

Image to_rgb_or_rgba(const Image& image) {
  if (image.mode == ImageMode::kRgba || (image.mode == ImageMode::kRgb && !image.transparent)) return image;
  Image out{.width = image.width,
            .height = image.height,
            .mode = image.has_alpha() ? ImageMode::kRgba : ImageMode::kRgb,
            .indexed = image.indexed};
  const int64_t C = image.channels(), to = out.channels(), n = image.width * image.height;
  out.pixels.resize(static_cast<size_t>(n * to));
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t* in = &image.pixels[i * C];
    uint8_t* rgb = &out.pixels[i * to];
    switch (image.mode) {
      case ImageMode::kGray:
      case ImageMode::kGrayAlpha:
        rgb[0] = rgb[1] = rgb[2] = in[0];
        break;
      case ImageMode::kCmyk:
        for (int c = 0; c < 3; ++c) {
          const int white = 255 - in[3];
          rgb[c] = static_cast<uint8_t>(std::clamp(white - mul_div_255(in[c], white), 0, 255));
        }
        break;
      default:
        std::memcpy(rgb, in, 3);
    }
    if (image.mode == ImageMode::kGrayAlpha) rgb[3] = in[1];
    if (image.transparent) {
      const auto& key = *image.transparent;
      const bool same =
          image.mode == ImageMode::kGray ? in[0] == key[0] : std::memcmp(in, key.data(), 3) == 0;
      rgb[3] = same ? 0 : 255;
    }
  }
  return out;
}

}  // namespace godwit::io
