// Kimi K3's image preprocessor: a picture to patches of 14 x 14 pixels.
//   scale    min(1, sqrt(L / (max(1, w div p) * max(1, h div p))), S p / w, S p / h), for p = patch_size,
//            L = in_patch_limit, S = patch_limit_on_one_side; new sides max(1, floor(side * scale))
//   resize   bicubic as Pillow (image_resize.h), in the picture's own mode
//   alpha    over a board of squares, in fp32, truncated to 8 bits
//   pad      zeros right and below, to multiples of p * merge
//   values   (x / 255 - mean) / std; the padding becomes -1
// Patches [N, 3, p, p], rows of patches first; merge x merge of them make one token.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "godwit/io/image.h"

namespace godwit::io {

enum class AlphaBackground { kBlack, kWhite, kChessboard };
enum class AlphaStage { kBeforeResize, kAfterResize };

// preprocessor_config.json's media_proc_cfg. The defaults are the released file's.
struct ImageProcessorConfig {
  int64_t patch_size = 14;
  int64_t merge = 2;  // merge_kernel_size
  int64_t in_patch_limit = 65536;
  int64_t patch_limit_on_one_side = 512;
  std::array<double, 3> mean = {0.5, 0.5, 0.5};
  std::array<double, 3> std = {0.5, 0.5, 0.5};
  AlphaBackground background = AlphaBackground::kChessboard;
  AlphaStage stage = AlphaStage::kAfterResize;
  int64_t square = 8;  // pixels
  bool white_on_top_left = true;
  int white = 255;
  int gray = 180;

  bool operator==(const ImageProcessorConfig&) const = default;
};

inline constexpr const char* kImageProcessorFile = "preprocessor_config.json";

// Reads DIRECTORY/preprocessor_config.json; without the file, the defaults. Keys that are absent take the
// released class's defaults (background black, before the resize, squares of 16, 255 and 200). A value that
// cannot be honoured is an Error.
ImageProcessorConfig load_image_processor(const fs::path& directory);
ImageProcessorConfig parse_image_processor(std::string_view json, const std::string& where);

// Writes DIRECTORY/preprocessor_config.json, which reads back the same.
void save_image_processor(const ImageProcessorConfig& config, const fs::path& directory);

// What becomes of a picture of this size.
struct ImagePlan {
  int64_t width = 0, height = 0;            // resized
  int64_t grid_width = 0, grid_height = 0;  // patches, padding included
  int64_t tokens = 0;                       // grid / merge²
};
ImagePlan plan_image(int64_t width, int64_t height, const ImageProcessorConfig& config);

struct PreparedImage {
  int64_t original_width = 0, original_height = 0;  // for the prompt "image {W}x{H}"
  ImagePlan plan;
  std::vector<uint8_t> canvas;  // [grid_height p, grid_width p, 3], resized, composed, padded
};
PreparedImage prepare_image(const Image& image, const ImageProcessorConfig& config);
// The same at a given size: the frames of a video share that of the first.
PreparedImage prepare_image_as(const Image& image, const ImagePlan& plan, const ImageProcessorConfig& config);

// What the tower sees of a byte, by channel: x / 255 in fp64, the rest in fp32, as the reference.
using PixelValues = std::array<std::array<float, 256>, 3>;
PixelValues pixel_values(const ImageProcessorConfig& config);

// The patches [grid_height * grid_width, 3, p, p]: bytes, to the end of `out`, and their values.
void append_patch_bytes(const PreparedImage& image, const ImageProcessorConfig& config,
                        std::vector<uint8_t>& out);
std::vector<float> image_patches(const PreparedImage& image, const ImageProcessorConfig& config);

}  // namespace godwit::io
