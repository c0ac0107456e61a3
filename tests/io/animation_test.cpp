// Animated WebP and PNG frame by frame, beside Pillow (python/make_image_fixtures.py); and base64.
#include "godwit/io/animation.h"

#include <gtest/gtest.h>

#include "godwit/base/file.h"
#include "godwit/io/base64.h"
#include "godwit/io/safetensors.h"
#include "godwit/io/video.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

const std::string kDirectory = GODWIT_FIXTURES "/images/animated/";

class Animations : public ::testing::TestWithParam<std::string> {};

TEST_P(Animations, EveryFrameAsPillowShowsIt) {
  const std::string file = read_file(kDirectory + "moving." + GetParam());
  const SafetensorsFile expected(kDirectory + "expected.safetensors");
  const StoredTensor& frames = expected.at(GetParam());  // [n, h, w, 4]
  const Bytes pixels = expected.bytes(frames);
  const std::vector<std::string> found = frames_of_animation(file, "moving");
  ASSERT_EQ(static_cast<int64_t>(found.size()), frames.shape[0]);
  const size_t size = pixels.size() / found.size();
  for (size_t i = 0; i < found.size(); ++i) {
    const Image image = decode_image(as_bytes(found[i]), "frame");
    ASSERT_EQ(image.mode, ImageMode::kRgba);
    ASSERT_EQ(image.pixels.size(), size);
    const auto* want = reinterpret_cast<const uint8_t*>(pixels.data()) + i * size;
    int worst = 0;
    for (size_t k = 0; k < size; k += 4) {
      if (want[k + 3] == 0 && image.pixels[k + 3] == 0) continue;  // no colour to see
      for (size_t c = 0; c < 4; ++c)
        worst = std::max(worst, std::abs(int{want[k + c]} - int{image.pixels[k + c]}));
    }
    EXPECT_LE(worst, 1) << "frame " << i;  // Pillow rounds its blending another way
  }
}

TEST_P(Animations, DamageIsAnErrorOrFrames) {
  const std::string file = read_file(kDirectory + "moving." + GetParam());
  for (size_t size = 1; size < file.size(); size += 1 + file.size() / 60) {
    try {
      frames_of_animation(std::string_view(file).substr(0, size), "moving");
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("moving: ")) << error.what();
    }
  }
  for (size_t at = 0; at < file.size(); at += 1 + file.size() / 200) {
    std::string bad = file;
    bad[at] = static_cast<char>(bad[at] ^ 0x11);
    try {
      frames_of_animation(bad, "moving");
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("moving: ")) << error.what();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, Animations, ::testing::Values("png", "webp"),
                         [](const auto& info) { return info.param; });

TEST(Video, StillsDirectoriesAndTimes) {
  const std::string still = read_file(GODWIT_FIXTURES "/images/rgb.png");
  EXPECT_EQ(frames_of_animation(still, "still"), std::vector<std::string>{still});
  testing::expect_error(
      [&] { frames_of_animation(read_file(kDirectory + "moving.png"), "moving", /*most=*/2); },
      {"moving", "more than 2 frames"});
  const testing::ScratchDir dir;
  testing::expect_error([&] { frames_of_directory(dir.path()); }, {"no frames"});
  testing::put_file(dir / "b.PNG", "second");
  testing::put_file(dir / "a.jpg", "first");
  testing::put_file(dir / "notes.txt", "no frame");
  EXPECT_EQ(frames_of_directory(dir.path()), (std::vector<std::string>{"first", "second"}));
  EXPECT_EQ(timestamp(0), "00:00:00.000");
  EXPECT_EQ(timestamp(3725.0625), "01:02:05.063");
}

TEST(Base64, RoundAndFaults) {
  EXPECT_EQ(decode_base64("", "x"), "");
  for (const char* text : {"", "f", "fo", "foo", "foob"})
    EXPECT_EQ(decode_base64(encode_base64(text), "x"), text);
  EXPECT_EQ(encode_base64("foob"), "Zm9vYg==");
  EXPECT_EQ(decode_base64("Zm9v", "x"), "foo");
  EXPECT_EQ(decode_base64("Zm9vYg==", "x"), "foob");
  EXPECT_EQ(decode_base64("Zm9v\nYmE=", "x"), "fooba");
  EXPECT_EQ(decode_base64("Zm9vYg", "x"), "foob");
  for (const char* bad : {"Z", "Zm9vY", "Zm9v=", "Zm=9v", "Zm9vYg===", "Zm9v-mFy", "Zm9v\x01"})
    testing::expect_error([&] { decode_base64(bad, "here"); }, {"here: not valid base64"});
  EXPECT_EQ(decode_data_url("data:image/png;base64,Zm9v", "x"), "foo");
  EXPECT_EQ(decode_data_url("cat.png", "x"), std::nullopt);
  testing::expect_error([] { decode_data_url("data:image/png,foo", "here"); }, {"here", "must be base64"});
  testing::expect_error([] { decode_data_url("data:image/png;base64", "here"); }, {"here", "must be base64"});
}

}  // namespace
}  // namespace godwit::io
