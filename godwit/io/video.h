// Videos as pictures: frames from a directory, an animated WebP or PNG, or a video file.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"
#include "godwit/io/image.h"

namespace godwit::io {

inline constexpr int64_t kMostFrames = 4096;   // of a video
inline constexpr int64_t kFramesTogether = 4;  // K3's temporal_merge_kernel_size: frames of one item

// The bytes of a file that should hold a picture or a video: a regular one (reading cannot wait) of at most
// 1 GiB, or an Error that names it.
std::string read_media_file(const fs::path& path);

// "hh:mm:ss.fff", K3's timestamp_mode.
std::string timestamp(double seconds);

// The JPEG, PNG and WebP files of a directory in the order of their names, encoded. None is an Error.
std::vector<std::string> frames_of_directory(const fs::path& directory);

// The frames of an animated WebP or PNG, each as a PNG of the whole canvas; of a still picture that one.
// Errors begin with `where`; more than `most` frames is one.
std::vector<std::string> frames_of_animation(std::string_view file, const std::string& where,
                                             int64_t most = kMostFrames, const ImageLimits& limits = {});

// MP4 or MOV, Matroska or WebM, AVI, Ogg, by the first bytes.
bool is_video_file(std::string_view file);

// Whether this build has ffmpeg's libraries.
bool reads_video_files();

// The pictures on display at each time k / fps of a video file, from its first one on, as PNGs. An Error that
// begins with `where` for what cannot be decoded, for more than `most` of them, and where the build has no
// libraries for it.
std::vector<std::string> frames_of_video_file(std::string_view file, double fps, const std::string& where,
                                              int64_t most = kMostFrames, const ImageLimits& limits = {});

}  // namespace godwit::io
