#include "godwit/io/video.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/io/animation.h"

namespace godwit::io {

std::string timestamp(double seconds) {
  const auto ms = static_cast<int64_t>(std::llround(seconds * 1000));
  return fmt::format("{:02}:{:02}:{:02}.{:03}", ms / 3'600'000, ms / 60'000 % 60, ms / 1000 % 60, ms % 1000);
}

std::vector<std::string> frames_of_directory(const fs::path& directory) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (!entry.is_regular_file() || entry.path().filename().string().starts_with('.')) continue;
    std::string extension = entry.path().extension().string();
    std::ranges::transform(extension, extension.begin(), [](unsigned char c) { return std::tolower(c); });
    if (extension == ".png" || extension == ".jpg" || extension == ".jpeg" || extension == ".webp")
      files.push_back(entry.path());
  }
  check(!files.empty(), "{}: no frames (JPEG, PNG or WebP)", directory.string());
  std::ranges::sort(files);
  std::vector<std::string> frames;
  for (const fs::path& file : files) frames.push_back(read_file(file.string()));
  return frames;
}

std::vector<std::string> frames_of_animation(std::string_view file, const std::string& where, int64_t most,
                                             const ImageLimits& limits) {
  std::vector<std::string> frames;
  const auto keep = [&](const Image& canvas) {
    check(static_cast<int64_t>(frames.size()) < most, "{}: more than {} frames", where, most);
    frames.push_back(encode_png(canvas));
  };
  if (is_animated_webp(file))
    decode_animated_webp(file, where, limits, keep);
  else if (is_animated_png(file))
    decode_animated_png(file, where, limits, keep);
  else
    frames.emplace_back(file);
  check(!frames.empty(), "{}: no frames", where);
  return frames;
}

}  // namespace godwit::io
