// Pictures on their way to the tower: decoded, resized and cut into patches, with what prompts and caches
// need to know of them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/image_processor.h"
#include "godwit/model/vision.h"

namespace godwit {

// One item of a prompt.
struct MediaItem {
  std::vector<float> patches;  // [grid.patches(), 3 p p]
  VisionGrid grid;
  int64_t width = 0, height = 0;  // of the original, in pixels: for "image {W}x{H}"
  int64_t tokens = 0;             // <|media_pad|> tokens it takes
  uint64_t hash = 0;              // of the pixels as the tower sees them, and the grid
};
using MediaList = std::vector<std::shared_ptr<const MediaItem>>;

// The encoded picture in `file`. Error, beginning with `where`, for what cannot be decoded or does not fit
// the tower.
std::shared_ptr<const MediaItem> read_picture(const VisionConfig& config,
                                              const io::ImageProcessorConfig& processor,
                                              std::string_view file, const std::string& where);

// Frames of a video that become vectors together, at most config.pos_emb_time of them. Every frame takes the
// size of the first.
std::shared_ptr<const MediaItem> read_frames(const VisionConfig& config,
                                             const io::ImageProcessorConfig& processor,
                                             const std::vector<std::string_view>& files,
                                             const std::string& where);

// DIRECTORY/preprocessor_config.json of a model; without the file the released settings with the tower's own
// patches. Checked against the tower, where there is one.
io::ImageProcessorConfig load_image_processor(const std::string& directory, const ModelConfig& config);

// Throws Error when the processor cuts other patches than the tower takes.
void check_processor(const VisionConfig& config, const io::ImageProcessorConfig& processor,
                     const std::string& where);

// Items one after another.
VisionInput vision_input(const VisionConfig& config, const MediaList& items);

}  // namespace godwit
