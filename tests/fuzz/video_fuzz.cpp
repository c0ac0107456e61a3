// io/ffmpeg/decode_video: any bytes as a video file. ffmpeg's libraries are not built with the sanitizers,
// which still see what is done with their frames and what is not given back.
#include "godwit/io/ffmpeg/decode_video.h"
#include "tests/fuzz/fuzz.h"

namespace {

constexpr int64_t kMostPixels = 1 << 16, kMostSide = 512;

struct Seen {
  int frames = 0;
  unsigned sum = 0;
};

bool see(void* user, const uint8_t* rgb, int64_t width, int64_t height) {
  using godwit::fuzz::require;
  auto& seen = *static_cast<Seen*>(user);
  require(width > 0 && height > 0 && width <= kMostSide && height <= kMostSide &&
          width * height <= kMostPixels);
  for (int64_t i = 0; i < width * height * 3; ++i) seen.sum += rgb[i];
  return ++seen.frames < 16;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  constexpr double kRates[] = {8, 0.001, 1e6, 29.97};
  Seen seen;
  const GodwitVideoJob job{.file = data + 1,
                           .bytes = size - 1,
                           .fps = kRates[data[0] % 4],
                           .max_pixels = kMostPixels,
                           .max_side = kMostSide,
                           .frame = &see,
                           .user = &seen};
  char message[256] = {};
  const int failed = godwit_decode_video(&job, message, sizeof message);
  // Frames without a fault, or a reason.
  godwit::fuzz::require(failed ? message[0] != '\0' : seen.frames > 0);
  return 0;
}
