#include "godwit/io/image_processor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/io/image_resize.h"

namespace godwit::io {
namespace {

using nlohmann::json;

const std::vector<std::string> kBackgrounds = {"black", "white", "chessboard"};
const std::vector<std::string> kStages = {"before_resize", "after_resize"};

// Keys of media_proc_cfg, each checked.
class Keys {
 public:
  Keys(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    check(object.is_object(), "{}: expected an object, got {}", where_, object.type_name());
  }
  bool has(const char* key) const { return object_.contains(key) && !object_.at(key).is_null(); }
  int64_t integer(const char* key, int64_t fallback, int64_t low, int64_t high) const {
    if (!has(key)) return fallback;
    const json& value = object_.at(key);
    const bool fits = value.is_number_integer() && value >= low && value <= high;
    check(fits, "{}: '{}' must be an integer from {} to {}, got {}", where_, key, low, high, value.dump());
    return value.get<int64_t>();
  }
  bool boolean(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    check(object_.at(key).is_boolean(), "{}: '{}' must be true or false, got {}", where_, key,
          object_.at(key).dump());
    return object_.at(key).get<bool>();
  }
  // One of `names`, as its place in the list.
  size_t choice(const char* key, size_t fallback, const std::vector<std::string>& names) const {
    if (!has(key)) return fallback;
    const json& value = object_.at(key);
    const auto found = value.is_string() ? std::ranges::find(names, value.get<std::string>()) : names.end();
    check(found != names.end(), "{}: '{}' must be one of {}, got {}", where_, key, json(names).dump(),
          value.dump());
    return static_cast<size_t>(found - names.begin());
  }
  std::array<double, 3> triple(const char* key, std::array<double, 3> fallback, bool positive) const {
    if (!has(key)) return fallback;
    const json& value = object_.at(key);
    bool fits = value.is_array() && value.size() == 3;
    for (size_t i = 0; fits && i < 3; ++i)
      fits = value[i].is_number() && (!positive || value[i].get<double>() > 0);
    check(fits, "{}: '{}' must be three {}numbers, got {}", where_, key, positive ? "positive " : "",
          value.dump());
    return {value[0].get<double>(), value[1].get<double>(), value[2].get<double>()};
  }
  Keys object(const char* key) const { return {object_.at(key), where_ + ": " + key}; }
  void refuse(const char* key) const {
    check(!has(key), "{}: '{}' is {}, which is not supported", where_, key,
          has(key) ? object_.at(key).dump() : "");
  }

 private:
  const json& object_;
  std::string where_;
};

// RGBA over the background; the board is counted from the picture's top left corner.
Image compose(const Image& rgba, const ImageProcessorConfig& config) {
  Image out{.width = rgba.width, .height = rgba.height, .mode = ImageMode::kRgb, .indexed = false};
  out.pixels.resize(static_cast<size_t>(rgba.width * rgba.height * 3));
  for (int64_t y = 0; y < rgba.height; ++y) {
    for (int64_t x = 0; x < rgba.width; ++x) {
      float board = config.background == AlphaBackground::kWhite ? 255.0f : 0.0f;
      if (config.background == AlphaBackground::kChessboard) {
        const bool odd = ((y / config.square + x / config.square) & 1) != 0;
        board = static_cast<float>(odd == config.white_on_top_left ? config.gray : config.white);
      }
      const uint8_t* in = &rgba.pixels[(y * rgba.width + x) * 4];
      const float alpha = static_cast<float>(in[3]) / 255.0f;
      for (int c = 0; c < 3; ++c) {
        const float value = alpha * static_cast<float>(in[c]) + (1.0f - alpha) * board;
        out.pixels[(y * rgba.width + x) * 3 + c] = static_cast<uint8_t>(value);
      }
    }
  }
  return out;
}

Image flatten(const Image& image, const ImageProcessorConfig& config) {
  const Image full = to_rgb_or_rgba(image);
  return full.mode == ImageMode::kRgba ? compose(full, config) : full;
}

int64_t round_up(int64_t n, int64_t unit) {
  return (n + unit - 1) / unit * unit;
}

}  // namespace

ImageProcessorConfig parse_image_processor(std::string_view text, const std::string& where) {
  const json root = json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false);
  check(root.is_object(), "{}: not a JSON object", where);
  const bool nested = root.contains("media_proc_cfg");
  const Keys keys(nested ? root.at("media_proc_cfg") : root, nested ? where + ": media_proc_cfg" : where);
  ImageProcessorConfig c;
  c.patch_size = keys.integer("patch_size", c.patch_size, 1, 1024);
  c.merge = keys.integer("merge_kernel_size", c.merge, 1, 64);
  c.in_patch_limit = keys.integer("in_patch_limit", c.in_patch_limit, 1, 1 << 24);
  c.patch_limit_on_one_side = keys.integer("patch_limit_on_one_side", c.patch_limit_on_one_side, 1, 1 << 16);
  c.mean = keys.triple("image_mean", c.mean, /*positive=*/false);
  c.std = keys.triple("image_std", c.std, /*positive=*/true);
  keys.refuse("fixed_output_tokens");
  c.stage = static_cast<AlphaStage>(keys.choice("transparent_bg_fill_stage", 0, kStages));
  c.background = AlphaBackground::kBlack;
  c.square = 16;
  c.gray = 200;
  if (keys.has("transparent_bg_config")) {
    const Keys board = keys.object("transparent_bg_config");
    c.background = static_cast<AlphaBackground>(board.choice("pattern", 0, kBackgrounds));
    c.square = board.integer("chessboard_square_size", c.square, 1, 1 << 16);
    c.white_on_top_left = board.boolean("chessboard_square_on_top_left", true);
    c.white = static_cast<int>(board.integer("chessboard_white_value", c.white, 0, 255));
    c.gray = static_cast<int>(board.integer("chessboard_gray_value", c.gray, 0, 255));
  }
  return c;
}

ImageProcessorConfig load_image_processor(const fs::path& directory) {
  const fs::path path = directory / kImageProcessorFile;
  if (!fs::exists(path)) return {};
  return parse_image_processor(read_file(path.string()), path.string());
}

void save_image_processor(const ImageProcessorConfig& c, const fs::path& directory) {
  const json board = {{"pattern", kBackgrounds[static_cast<size_t>(c.background)]},
                      {"chessboard_square_size", c.square},
                      {"chessboard_square_on_top_left", c.white_on_top_left},
                      {"chessboard_white_value", c.white},
                      {"chessboard_gray_value", c.gray}};
  const json config = {{"patch_size", c.patch_size},
                       {"merge_kernel_size", c.merge},
                       {"in_patch_limit", c.in_patch_limit},
                       {"patch_limit_on_one_side", c.patch_limit_on_one_side},
                       {"image_mean", c.mean},
                       {"image_std", c.std},
                       {"transparent_bg_fill_stage", kStages[static_cast<size_t>(c.stage)]},
                       {"transparent_bg_config", board}};
  write_file_atomic(directory / kImageProcessorFile, json{{"media_proc_cfg", config}}.dump(2) + "\n");
}

ImagePlan plan_image(int64_t width, int64_t height, const ImageProcessorConfig& config) {
  check(width > 0 && height > 0, "an image of {} x {} has no pixels", width, height);
  const int64_t p = config.patch_size;
  const auto patches =
      static_cast<double>(std::max<int64_t>(1, width / p) * std::max<int64_t>(1, height / p));
  const auto side = static_cast<double>(config.patch_limit_on_one_side * p);
  const double scale = std::min({1.0, std::sqrt(static_cast<double>(config.in_patch_limit) / patches),
                                 side / static_cast<double>(width), side / static_cast<double>(height)});
  const auto scaled = [&](int64_t n) {
    const auto value = static_cast<int64_t>(static_cast<double>(n) * scale);
    return std::clamp<int64_t>(value, 1, config.patch_limit_on_one_side * p);
  };
  ImagePlan plan{.width = scaled(width), .height = scaled(height)};
  plan.grid_width = round_up(plan.width, p * config.merge) / p;
  plan.grid_height = round_up(plan.height, p * config.merge) / p;
  plan.tokens = plan.grid_width / config.merge * (plan.grid_height / config.merge);
  return plan;
}

PreparedImage prepare_image(const Image& image, const ImageProcessorConfig& config) {
  return prepare_image_as(image, plan_image(image.width, image.height, config), config);
}

PreparedImage prepare_image_as(const Image& image, const ImagePlan& plan,
                               const ImageProcessorConfig& config) {
  const Image rgb = config.stage == AlphaStage::kBeforeResize && image.has_alpha()
                        ? resize_image(flatten(image, config), plan.width, plan.height)
                        : flatten(resize_image(image, plan.width, plan.height), config);
  PreparedImage out{
      .original_width = image.width, .original_height = image.height, .plan = plan, .canvas = {}};
  const int64_t canvas_width = plan.grid_width * config.patch_size;
  out.canvas.resize(static_cast<size_t>(canvas_width * plan.grid_height * config.patch_size * 3));
  for (int64_t y = 0; y < plan.height; ++y)
    std::memcpy(&out.canvas[y * canvas_width * 3], &rgb.pixels[y * plan.width * 3], plan.width * 3);
  return out;
}

PixelValues pixel_values(const ImageProcessorConfig& config) {
  PixelValues values;
  for (int c = 0; c < 3; ++c) {
    for (int x = 0; x < 256; ++x) {
      const auto unit = static_cast<float>(x / 255.0);
      values[c][x] = (unit - static_cast<float>(config.mean[c])) / static_cast<float>(config.std[c]);
    }
  }
  return values;
}

void append_patch_bytes(const PreparedImage& image, const ImageProcessorConfig& config,
                        std::vector<uint8_t>& out) {
  const int64_t p = config.patch_size, columns = image.plan.grid_width, row = columns * p * 3;
  const size_t begin = out.size();
  out.resize(begin + image.canvas.size());
  uint8_t* to = out.data() + begin;
  for (int64_t gy = 0; gy < image.plan.grid_height; ++gy) {
    for (int64_t gx = 0; gx < columns; ++gx) {
      for (int c = 0; c < 3; ++c) {
        for (int64_t y = 0; y < p; ++y) {
          const uint8_t* in = &image.canvas[(gy * p + y) * row + gx * p * 3 + c];
          for (int64_t x = 0; x < p; ++x) *to++ = in[x * 3];
        }
      }
    }
  }
}

std::vector<float> image_patches(const PreparedImage& image, const ImageProcessorConfig& config) {
  std::vector<uint8_t> bytes;
  append_patch_bytes(image, config, bytes);
  const PixelValues values = pixel_values(config);
  const size_t plane = static_cast<size_t>(config.patch_size * config.patch_size);
  std::vector<float> out(bytes.size());
  for (size_t i = 0; i < bytes.size(); ++i) out[i] = values[i / plane % 3][bytes[i]];
  return out;
}

}  // namespace godwit::io
