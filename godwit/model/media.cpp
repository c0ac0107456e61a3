#include "godwit/model/media.h"

#include <ATen/ATen.h>

#include <span>

#include "godwit/base/check.h"
#include "godwit/io/checksum.h"
#include "godwit/io/image.h"

namespace godwit {
namespace {

// A frame's pixels, in the size of the first one.
io::PreparedImage prepare(const io::ImageProcessorConfig& processor, std::string_view file,
                          const io::ImagePlan* plan, const std::string& where) {
  const io::Image image = io::decode_image(io::as_bytes(file), where);
  return plan ? io::prepare_image_as(image, *plan, processor) : io::prepare_image(image, processor);
}

}  // namespace

std::shared_ptr<const MediaItem> read_picture(const VisionConfig& config,
                                              const io::ImageProcessorConfig& processor,
                                              std::string_view file, const std::string& where) {
  return read_frames(config, processor, {file}, where);
}

std::shared_ptr<const MediaItem> read_frames(const VisionConfig& config,
                                             const io::ImageProcessorConfig& processor,
                                             const std::vector<std::string_view>& files,
                                             const std::string& where) {
  check(!files.empty(), "{}: no picture", where);
  auto item = std::make_shared<MediaItem>();
  io::Xxh3 hash;
  io::ImagePlan plan;
  for (const std::string_view file : files) {
    const bool first = item->patches.empty();
    const io::PreparedImage frame = prepare(processor, file, first ? nullptr : &plan, where);
    if (first) {
      plan = frame.plan;
      item->width = frame.original_width;
      item->height = frame.original_height;
    }
    const std::vector<float> patches = io::image_patches(frame, processor);
    item->patches.insert(item->patches.end(), patches.begin(), patches.end());
    hash.update(std::as_bytes(std::span(frame.canvas)));
  }
  item->grid = {
      .frames = static_cast<int64_t>(files.size()), .rows = plan.grid_height, .columns = plan.grid_width};
  check_grid(config, item->grid, where);
  item->tokens = vision_tokens(config, item->grid);
  const int64_t shape[] = {item->grid.frames, item->grid.rows, item->grid.columns};
  hash.update(std::as_bytes(std::span(shape)));
  item->hash = hash.digest();
  return item;
}

io::ImageProcessorConfig load_image_processor(const std::string& directory, const ModelConfig& config) {
  const io::fs::path path = io::fs::path(directory) / io::kImageProcessorFile;
  io::ImageProcessorConfig processor = io::load_image_processor(directory);
  if (!config.vision) return processor;
  if (!io::fs::exists(path)) {
    processor.patch_size = config.vision->patch_size;
    processor.merge = config.vision->merge_height;
  }
  check_processor(*config.vision, processor, path.string());
  return processor;
}

void check_processor(const VisionConfig& config, const io::ImageProcessorConfig& processor,
                     const std::string& where) {
  check(processor.patch_size == config.patch_size && processor.merge == config.merge_height &&
            processor.merge == config.merge_width,
        "{}: pictures are cut into patches of {} pixels, {} x {} to a vector; the vision tower takes {}, {} "
        "x {}",
        where, processor.patch_size, processor.merge, processor.merge, config.patch_size, config.merge_height,
        config.merge_width);
}

VisionInput vision_input(const VisionConfig& config, const MediaList& items) {
  VisionInput input;
  int64_t patches = 0;
  for (const auto& item : items) {
    input.grids.push_back(item->grid);
    patches += item->grid.patches();
  }
  input.patches = at::empty({patches, 3 * config.patch_size * config.patch_size}, at::kFloat);
  float* to = input.patches.mutable_data_ptr<float>();
  for (const auto& item : items) to = std::copy(item->patches.begin(), item->patches.end(), to);
  return input;
}

}  // namespace godwit
