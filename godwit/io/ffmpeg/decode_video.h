// Between io/video.cpp and the module that is linked with ffmpeg's libraries, loaded when the first video
// file comes: they are a hundred shared objects that no other command should wait for.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct GodwitVideoJob {
  const uint8_t* file;
  size_t bytes;
  double fps;  // frames a second that are wanted
  int64_t max_pixels, max_side;
  // A frame in RGB, rows one after another. False: enough.
  bool (*frame)(void* user, const uint8_t* rgb, int64_t width, int64_t height);
  void* user;
};

// Calls `frame` for the picture on display at each time k / fps from the first one on. 0, or 1 with a
// message.
int godwit_decode_video(const GodwitVideoJob* job, char* message, size_t message_bytes);
}
