// Pictures of every kind against Pillow and NumPy (python/make_image_fixtures.py), and damaged ones.
#include "godwit/io/image.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "godwit/base/rng.h"
#include "godwit/io/image_processor.h"
#include "godwit/io/image_resize.h"
#include "godwit/io/safetensors.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using nlohmann::json;
using testing::expect_error;

const fs::path kFixtures = fs::path(GODWIT_FIXTURES) / "images";

std::string fixture(const std::string& name) {
  return read_file((kFixtures / name).string());
}

Image decode(const std::string& bytes, const ImageLimits& limits = {}) {
  return decode_image(as_bytes(bytes), "picture", limits);
}

// Whether this build has the library of a fixture's format.
bool readable(const std::string& name) {
  try {
    decode(fixture(name));
    return true;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("this build has no lib"), std::string::npos) << error.what();
    return false;
  }
}

// A chunk or marker of a file changed in place, for hostile headers.
std::string with(std::string bytes, size_t at, std::string_view text) {
  bytes.replace(at, text.size(), text);
  return bytes;
}

std::string big_endian(uint32_t n) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(n >> shift & 255);
  return out;
}

class ImageCases : public ::testing::TestWithParam<int> {
 public:
  static const json& cases() {
    static const json all = json::parse(fixture("cases.json"));
    return all;
  }
};

// Within one level of the reference everywhere: JPEG and WebP decoders of other versions may round otherwise.
// What needs no lossy decoder is exact.
TEST_P(ImageCases, LikePillow) {
  const json& row = cases().at(GetParam());
  const auto file = row["file"].get<std::string>();
  SCOPED_TRACE(file + " " + row["media_proc_cfg"].dump());
  if (!readable(file)) GTEST_SKIP();
  const ImageProcessorConfig config = parse_image_processor(row["media_proc_cfg"].dump(), file);
  const Image image = load_image(kFixtures / file);
  EXPECT_EQ(json({image.width, image.height}), row["size"]);
  const PreparedImage prepared = prepare_image(image, config);
  const ImagePlan& plan = prepared.plan;
  ASSERT_EQ(json({plan.width, plan.height}), row["resized"]);
  EXPECT_EQ(prepared.original_width, image.width);
  EXPECT_EQ(plan.grid_width, 2 * ((plan.width + 27) / 28));
  EXPECT_EQ(plan.grid_height, 2 * ((plan.height + 27) / 28));
  EXPECT_EQ(plan.tokens, plan.grid_width * plan.grid_height / 4);

  const SafetensorsFile expected(kFixtures / "expected.safetensors");
  const Bytes want = expected.bytes(expected.at("resized." + std::to_string(GetParam())));
  ASSERT_EQ(static_cast<int64_t>(want.size()), plan.width * plan.height * 3);
  const int64_t row_bytes = plan.grid_width * 14 * 3;
  int64_t worst = 0, differing = 0;
  for (int64_t y = 0; y < plan.grid_height * 14; ++y) {
    for (int64_t x = 0; x < row_bytes; ++x) {
      const bool inside = y < plan.height && x < plan.width * 3;
      const int expect = inside ? static_cast<int>(want[y * plan.width * 3 + x]) : 0;
      const int64_t error = std::abs(prepared.canvas[y * row_bytes + x] - expect);
      worst = std::max(worst, error);
      differing += error > 0;
    }
  }
  const bool lossy = file.ends_with(".jpg") || file == "lossy.webp";
  EXPECT_LE(worst, lossy ? 1 : 0) << differing << " of " << want.size() << " samples differ";
  RecordProperty("worst", static_cast<int>(worst));

  const std::vector<float> patches = image_patches(prepared, config);
  ASSERT_EQ(static_cast<int64_t>(patches.size()), plan.grid_width * plan.grid_height * 3 * 14 * 14);
  if (const StoredTensor* tensor = expected.find("patches." + std::to_string(GetParam()))) {
    const Bytes bytes = expected.bytes(*tensor);
    ASSERT_EQ(bytes.size(), patches.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(bytes.data(), patches.data(), bytes.size()), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ImageCases,
                         ::testing::Range(0, static_cast<int>(ImageCases::cases().size())));

TEST(Image, ModesAndAlpha) {
  if (!readable("lossless_alpha.webp")) GTEST_SKIP() << "no libwebp";
  const auto mode = [](const char* name) { return decode(fixture(name)).mode; };
  EXPECT_EQ(mode("rgb.png"), ImageMode::kRgb);
  EXPECT_EQ(mode("gray16.png"), ImageMode::kGray);
  EXPECT_EQ(mode("gray_alpha.png"), ImageMode::kGrayAlpha);
  EXPECT_EQ(mode("cmyk.jpg"), ImageMode::kCmyk);
  EXPECT_EQ(mode("lossless_alpha.webp"), ImageMode::kRgba);
  EXPECT_TRUE(decode(fixture("palette.png")).indexed);
  EXPECT_FALSE(decode(fixture("palette.png")).has_alpha());
  EXPECT_TRUE(decode(fixture("palette_alpha.png")).has_alpha());
  EXPECT_TRUE(decode(fixture("rgb_key.png")).transparent.has_value());
  EXPECT_TRUE(decode(fixture("bits.png")).indexed);
}

TEST(Image, IsNotTurnedByExif) {
  const Image image = decode(fixture("turned.jpg"));  // orientation 6; the released processor does not look
  EXPECT_EQ(image.width, 61);
  EXPECT_EQ(image.height, 47);
}

TEST(Image, SixteenBitsKeepTheUpperByte) {
  const Image image = decode(fixture("rgb16.png"));
  EXPECT_EQ(image.pixels.size(), 40u * 33 * 3);
}

TEST(Image, InfoReadsTheHeaderOnly) {
  for (const auto& [name, format] :
       {std::pair{"rgb.png", "png"}, {"cmyk.jpg", "jpeg"}, {"lossy.webp", "webp"}}) {
    if (!readable(name)) continue;
    const std::string bytes = fixture(name).substr(0, 700);  // most of the data are missing
    const ImageInfo info = image_info(as_bytes(bytes), name);
    EXPECT_EQ(info.format, format);
    EXPECT_EQ(info.width, 61);
    EXPECT_EQ(info.height, 47);
  }
}

TEST(BadImage, NotAnImage) {
  expect_error([] { decode(""); }, {"picture", "empty file"});
  expect_error([] { decode("GIF89a......."); }, {"picture: not a JPEG, PNG or WebP"});
  expect_error([] { decode("\x89PNG"); }, {"not a JPEG, PNG or WebP"});
  expect_error([] { load_image(kFixtures / "absent.png"); }, {"absent.png"});
}

TEST(BadImage, TheNameSaysNothing) {
  const testing::ScratchDir dir;
  testing::put_file(dir / "a.jpg", fixture("rgb.png"));
  testing::put_file(dir / "b.png", fixture("rgb_420.jpg"));
  testing::put_file(dir / "c.png", "a text");
  EXPECT_EQ(load_image(dir / "a.jpg").pixels, decode(fixture("rgb.png")).pixels);
  EXPECT_EQ(load_image(dir / "b.png").pixels, decode(fixture("rgb_420.jpg")).pixels);
  expect_error([&] { load_image(dir / "c.png"); }, {"c.png: not a JPEG, PNG or WebP"});
}

// A file cut anywhere is an error that names it, never a picture with invented pixels.
TEST(BadImage, Truncated) {
  for (const char* name : {"rgb.png", "palette_alpha.png", "rgb_420.jpg", "rgb_444_progressive.jpg",
                           "cmyk.jpg", "lossy.webp", "lossless_alpha.webp"}) {
    const std::string whole = fixture(name);
    for (size_t keep = 1; keep < whole.size() - 16; keep += std::max<size_t>(1, whole.size() / 40)) {
      SCOPED_TRACE(fmt::format("{} cut to {} of {}", name, keep, whole.size()));
      expect_error([&] { decode(whole.substr(0, keep)); }, {"picture: "});
    }
  }
}

// Any byte may be anything: an error or a picture, but no crash and no more pixels than the limit.
TEST(BadImage, Damaged) {
  const ImageLimits limits{.max_pixels = 1 << 20};
  for (const char* name : {"rgb.png", "palette_alpha.png", "rgb16.png", "gray_key.png", "rgb_420.jpg",
                           "rgb_444_progressive.jpg", "cmyk.jpg", "lossy.webp", "lossless_alpha.webp"}) {
    const std::string whole = fixture(name);
    for (uint64_t i = 0; i < 300; ++i) {
      std::string bytes = whole;
      for (uint64_t k = 0; k <= i % 4; ++k) {
        const size_t range = i % 2 ? std::min<size_t>(bytes.size(), 200) : bytes.size();  // headers above all
        bytes[random_bits(5, 2 * k, i) % range] = static_cast<char>(random_bits(5, 2 * k + 1, i));
      }
      try {
        const Image image = decode(bytes, limits);
        ASSERT_EQ(static_cast<int64_t>(image.pixels.size()), image.width * image.height * image.channels());
        ASSERT_LE(image.width * image.height, limits.max_pixels);
      } catch (const Error& error) {
        ASSERT_EQ(std::string(error.what()).find("picture: "), 0u) << error.what();
      }
    }
  }
}

TEST(BadImage, DecompressionBombIsRefusedByItsHeader) {
  // 100,000 x 100,000 pixels, 30 GB of RGB, announced by a few bytes.
  const std::string png = with(fixture("rgb.png"), 16, big_endian(100'000) + big_endian(100'000));
  expect_error([&] { decode(png); }, {"picture"});
  std::string jpeg = fixture("rgb_420.jpg");
  const size_t frame = jpeg.find("\xFF\xC0");
  ASSERT_NE(frame, std::string::npos);
  jpeg = with(jpeg, frame + 5, std::string("\xFF\xDC\xFF\xDC", 4));
  expect_error([&] { decode(jpeg); }, {"65500 x 65500 pixels are too many: at most 89478485"});
  expect_error([] { decode(fixture("rgb.png"), {.max_pixels = 61 * 47 - 1}); },
               {"61 x 47 pixels are too many"});
  if (readable("lossy.webp"))
    expect_error([] { decode(fixture("lossy.webp"), {.max_side = 60}); }, {"61 x 47 pixels are too many"});
  EXPECT_EQ(decode(fixture("rgb.png"), {.max_pixels = 61 * 47}).width, 61);
}

TEST(BadImage, WithoutPixels) {
  const std::string png = with(fixture("rgb.png"), 16, big_endian(0) + big_endian(47));
  expect_error([&] { decode(png); }, {"picture: "});
  std::string jpeg = fixture("rgb_420.jpg");
  jpeg = with(jpeg, jpeg.find("\xFF\xC0") + 5, std::string("\0\x2f\0\0", 4));
  expect_error([&] { decode(jpeg); }, {"picture: "});
  expect_error([] { plan_image(0, 5, {}); }, {"0 x 5"});
}

TEST(ImagePlan, TheRuleOfTheRelease) {
  const auto plan = [](int64_t w, int64_t h) { return plan_image(w, h, {}); };
  EXPECT_EQ(plan(3584, 3584).width, 3584);  // 256 x 256 patches: just fits
  EXPECT_EQ(plan(3584, 3584).tokens, 128 * 128);
  EXPECT_EQ(plan(3597, 3597).width, 3597);  // flooring and padding allow a few more
  EXPECT_EQ(plan(3597, 3597).tokens, 129 * 129);
  EXPECT_EQ(plan(20'000, 100).width, 7168);  // 512 patches on a side
  EXPECT_EQ(plan(20'000, 100).height, 35);
  EXPECT_EQ(plan(20'000, 1).height, 1);
  EXPECT_EQ(plan(1, 1).tokens, 1);
  EXPECT_EQ(plan(29, 28).tokens, 2);
  for (int64_t w = 1; w < 12'000;
       w = w * 5 / 3 + 1) {  // never more than 256 tokens a side, 65536 patches or so
    for (int64_t h = 1; h < 12'000; h = h * 7 / 4 + 1) {
      const ImagePlan p = plan(w, h);
      EXPECT_LE(std::max(p.grid_width, p.grid_height), 512);
      EXPECT_LE(p.grid_width * p.grid_height, 65536 * 11 / 10);
      EXPECT_LE(p.width, w);
      EXPECT_LE(p.height, h);
    }
  }
}

TEST(ImageProcessor, ReadsTheReleasedSettings) {
  const char* text = R"({"media_proc_cfg": {"in_patch_limit": 65536, "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 16384, "patch_size": 14, "merge_kernel_size": 2, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "transparent_bg_config": {"pattern": "chessboard", "chessboard_square_size": 8,
    "chessboard_square_on_top_left": true, "chessboard_white_value": 255, "chessboard_gray_value": 180},
    "transparent_bg_fill_stage": "after_resize", "fixed_output_tokens": null}})";
  const ImageProcessorConfig c = parse_image_processor(text, "p");
  const ImageProcessorConfig defaults;
  EXPECT_EQ(c.square, defaults.square);
  EXPECT_EQ(c.gray, 180);
  EXPECT_EQ(c.background, AlphaBackground::kChessboard);
  EXPECT_EQ(c.stage, AlphaStage::kAfterResize);
  const ImageProcessorConfig absent = parse_image_processor("{}", "p");
  EXPECT_EQ(absent.background, AlphaBackground::kBlack);
  EXPECT_EQ(absent.stage, AlphaStage::kBeforeResize);
  EXPECT_EQ(absent.square, 16);
  EXPECT_EQ(absent.gray, 200);
  expect_error([] { parse_image_processor("[", "p"); }, {"p: not a JSON object"});
  expect_error([] { parse_image_processor(R"({"fixed_output_tokens": 64})", "p"); }, {"fixed_output_tokens"});
  expect_error([] { parse_image_processor(R"({"patch_size": 0})", "p"); }, {"patch_size", "got 0"});
  expect_error([] { parse_image_processor(R"({"image_std": [0.5, 0, 0.5]})", "p"); },
               {"image_std", "positive"});
  expect_error([] { parse_image_processor(R"({"transparent_bg_config": {"pattern": "dots"}})", "p"); },
               {"transparent_bg_config", "pattern", "dots"});
}

}  // namespace
}  // namespace godwit::io
