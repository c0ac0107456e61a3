// Resizing as Pillow does it (src/libImaging/Resample.c), bit for bit: bicubic with a = -0.5, widened when
// the picture shrinks (antialiasing), separable, coefficients in 22-bit fixed point, rows first, each pass
// rounded to 8 bits. Nearest neighbour for indexed pictures; alpha is premultiplied meanwhile.
#pragma once

#include "godwit/io/image.h"

namespace godwit::io {

Image resize_image(const Image& image, int64_t width, int64_t height);

// Every mode as kRgb, or kRgba where there is alpha.
Image to_rgb_or_rgba(const Image& image);

}  // namespace godwit::io
