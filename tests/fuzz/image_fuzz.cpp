// io/image, image_processor and animation: any bytes as a picture or an animation. The first byte chooses.
#include "godwit/io/animation.h"
#include "godwit/io/image.h"
#include "godwit/io/image_processor.h"
#include "godwit/io/video.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace godwit;
  if (size == 0) return 0;
  const std::string_view file = fuzz::text(data + 1, size - 1);
  const io::ImageLimits limits{.max_pixels = 1 << 20, .max_side = 4096};  // a fuzzer's time, not a user's
  if (data[0] % 2 == 0) {
    fuzz::accepts([&] {
      const io::ImageInfo info = io::image_info(io::as_bytes(file), "picture", limits);
      const io::Image image = io::decode_image(io::as_bytes(file), "picture", limits);
      fuzz::require(image.width == info.width && image.height == info.height);
      fuzz::require(image.pixels.size() ==
                    static_cast<size_t>(image.width * image.height * image.channels()));
      const io::PreparedImage prepared = io::prepare_image(image, {});
      fuzz::require(io::image_patches(prepared, {}).size() == prepared.canvas.size());
      fuzz::require(prepared.plan.grid_width % 2 == 0 && prepared.plan.grid_height % 2 == 0);
    });
  } else {
    fuzz::accepts([&] {
      for (const std::string& frame : io::frames_of_animation(file, "animation", /*limit=*/8, limits))
        io::image_info(io::as_bytes(frame), "frame");
    });
  }
  return 0;
}
