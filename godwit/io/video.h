// Videos as pictures: frames from a directory or an animated WebP or PNG.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"
#include "godwit/io/image.h"

namespace godwit::io {

inline constexpr int64_t kFramesTogether = 4;  // K3's temporal_merge_kernel_size: frames of one item

// "hh:mm:ss.fff", K3's timestamp_mode.
std::string timestamp(double seconds);

// The JPEG, PNG and WebP files of a directory in the order of their names, encoded. None is an Error.
std::vector<std::string> frames_of_directory(const fs::path& directory);

// The frames of an animated WebP or PNG, each as a PNG of the whole canvas; of a still picture that one.
// Errors begin with `where`; more than `most` frames is one.
std::vector<std::string> frames_of_animation(std::string_view file, const std::string& where,
                                             int64_t most = 4096, const ImageLimits& limits = {});

}  // namespace godwit::io
