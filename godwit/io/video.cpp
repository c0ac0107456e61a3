#include "godwit/io/video.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/io/animation.h"
#include "godwit/io/ffmpeg/decode_video.h"

namespace godwit::io {
namespace {

using DecodeVideo = decltype(&godwit_decode_video);

// The module of this build, from the program's directory; null: there is none.
DecodeVideo find_decoder() {
  if (!GODWIT_WITH_FFMPEG) return nullptr;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  for (const fs::path& directory : {program.parent_path(), fs::path(GODWIT_FFMPEG_DIRECTORY)}) {
    void* module = ::dlopen((directory / "libgodwit_video.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (module) return reinterpret_cast<DecodeVideo>(::dlsym(module, "godwit_decode_video"));
  }
  return nullptr;
}

DecodeVideo decoder() {
  static const DecodeVideo found = find_decoder();
  return found;
}

// Pixels of all frames together, as a multiple of what one picture may have: 4,096 frames of 1,280 x 720. A
// small file can show a large picture for long.
constexpr int64_t kFramesOfMostPixels = 42;

// Frames as PNGs, up to a bound.
struct Kept {
  const std::string& where;
  int64_t most;
  const ImageLimits& limits;
  int64_t pixels = 0;
  std::vector<std::string> frames = {};
  std::exception_ptr fault = {};

  void add(const Image& canvas) {
    check(static_cast<int64_t>(frames.size()) < most, "{}: more than {} frames", where, most);
    pixels += canvas.width * canvas.height;
    check(pixels <= kFramesOfMostPixels * limits.max_pixels, "{}: more than {} pixels in all frames", where,
          kFramesOfMostPixels * limits.max_pixels);
    frames.push_back(encode_png(canvas));
  }

  // For a C interface, which nothing may throw through.
  static bool keep(void* user, const uint8_t* rgb, int64_t width, int64_t height) {
    auto& kept = *static_cast<Kept*>(user);
    try {
      kept.add(
          {.width = width, .height = height, .pixels = {rgb, rgb + static_cast<size_t>(width * height * 3)}});
      return true;
    } catch (...) {
      kept.fault = std::current_exception();
      return false;
    }
  }
};

}  // namespace

std::string read_media_file(const fs::path& path) {
  constexpr uintmax_t kMostBytes = uintmax_t{1} << 30;
  std::error_code error;
  if (fs::is_regular_file(path, error))
    check(fs::file_size(path, error) <= kMostBytes || error,
          "{}: more than {} bytes for a picture or a video", path.string(), kMostBytes);
  return read_regular_file(path.string());
}

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
  check(std::ssize(files) <= kMostFrames, "{}: more than {} frames", directory.string(), kMostFrames);
  std::ranges::sort(files);
  std::vector<std::string> frames;
  for (const fs::path& file : files) frames.push_back(read_media_file(file));
  return frames;
}

std::vector<std::string> frames_of_animation(std::string_view file, const std::string& where, int64_t most,
                                             const ImageLimits& limits) {
  Kept kept{.where = where, .most = most, .limits = limits};
  const auto keep = [&](const Image& canvas) { kept.add(canvas); };
  if (is_animated_webp(file))
    decode_animated_webp(file, where, limits, keep);
  else if (is_animated_png(file))
    decode_animated_png(file, where, limits, keep);
  else
    kept.frames.emplace_back(file);
  check(!kept.frames.empty(), "{}: no frames", where);
  return std::move(kept.frames);
}

bool is_video_file(std::string_view file) {
  const auto at = [&](size_t offset, std::string_view magic) {
    return file.size() >= offset + magic.size() && file.substr(offset, magic.size()) == magic;
  };
  return at(4, "ftyp") || at(0, "\x1A\x45\xDF\xA3") || (at(0, "RIFF") && at(8, "AVI ")) || at(0, "OggS");
}

bool reads_video_files() {
  return decoder() != nullptr;
}

std::vector<std::string> frames_of_video_file(std::string_view file, double fps, const std::string& where,
                                              int64_t most, const ImageLimits& limits) {
  check(reads_video_files(), "{}: a video file, and this build has none of ffmpeg's libraries to read it",
        where);
  check(fps > 0, "{}: {} frames a second", where, fps);
  Kept kept{.where = where, .most = most, .limits = limits};
  const GodwitVideoJob job{.file = reinterpret_cast<const uint8_t*>(file.data()),
                           .bytes = file.size(),
                           .fps = fps,
                           .max_pixels = limits.max_pixels,
                           .max_side = limits.max_side,
                           .frame = &Kept::keep,
                           .user = &kept};
  char message[256] = {};
  const int failed = decoder()(&job, message, sizeof message);
  if (kept.fault) std::rethrow_exception(kept.fault);
  check(failed == 0, "{}: {}", where, message);
  check(!kept.frames.empty(), "{}: no frames", where);
  return std::move(kept.frames);
}

}  // namespace godwit::io
