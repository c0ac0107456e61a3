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

// colours.mp4 (MPEG-4) and colours.webm (VP8): red, green and blue for a second each, at five frames a
// second.
class VideoFiles : public ::testing::TestWithParam<const char*> {
 protected:
  VideoFiles() : file_(read_file(kDirectory + "colours." + GetParam())) {}
  std::string file_;
};

TEST_P(VideoFiles, WhatIsOnDisplayAtEachTime) {
  ASSERT_TRUE(is_video_file(file_));
  if (!reads_video_files()) {
    testing::expect_error([&] { frames_of_video_file(file_, 8, "clip"); }, {"clip", "ffmpeg"});
    GTEST_SKIP() << "no ffmpeg libraries";
  }
  for (const double fps : {1.0, 5.0, 8.0}) {  // fewer frames than the file has, its own, more
    const std::vector<std::string> frames = frames_of_video_file(file_, fps, "clip");
    ASSERT_EQ(frames.size(), static_cast<size_t>(3 * fps));
    for (size_t i = 0; i < frames.size(); ++i) {
      const Image image = decode_image(as_bytes(frames[i]), "frame");
      ASSERT_EQ(std::pair(image.width, image.height), std::pair(int64_t{40}, int64_t{32}));
      const auto bright = static_cast<size_t>(static_cast<double>(i) / fps);  // red, green, blue
      for (size_t channel = 0; channel < 3; ++channel)
        EXPECT_NEAR(image.pixels[3 * (16 * 40 + 20) + channel], channel == bright ? 255 : 0, 12) << i;
    }
  }
  testing::expect_error([&] { frames_of_video_file(file_, 8, "clip", /*most=*/5); },
                        {"clip", "more than 5 frames"});
  testing::expect_error([&] { frames_of_video_file(file_, 8, "clip", 100, {.max_pixels = 1000}); },
                        {"clip", "40 x 32 pixels are too many"});
  // 300 pictures, each of the size that is allowed.
  testing::expect_error([&] { frames_of_video_file(file_, 100, "clip", 1000, {.max_pixels = 40 * 32}); },
                        {"clip", "more than 53760 pixels in all frames"});
}

TEST_P(VideoFiles, DamageIsAnErrorOrFrames) {
  if (!reads_video_files()) GTEST_SKIP() << "no ffmpeg libraries";
  const auto survives = [](const std::string& bad) {
    try {
      for (const std::string& frame : frames_of_video_file(bad, 8, "clip", 64))
        decode_image(as_bytes(frame), "frame");
    } catch (const Error& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with("clip: ")) << error.what();
    }
  };
  for (size_t part = 0; part < 20; ++part) survives(file_.substr(0, file_.size() * part / 20));
  for (size_t seed = 0; seed < 100; ++seed) {
    std::string bad = file_;
    for (size_t i = 0; i < 3; ++i)
      bad[(seed * 7919 + i * 104729) % bad.size()] ^= static_cast<char>(1 << (seed % 8));
    survives(bad);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, VideoFiles, ::testing::Values("mp4", "webm"),
                         [](const auto& info) { return info.param; });

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
