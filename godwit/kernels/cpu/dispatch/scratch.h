// Work memory of CPU kernels, kept between calls: fresh pages cost more than the arithmetic on them (a page
// fault is about 0.5 us per 4 KiB).
#pragma once

#include <cstddef>
#include <cstdint>

namespace godwit::kernels {

// `floats` floats of this thread, 64-byte aligned, contents undefined; valid until the thread asks again.
float* thread_scratch(int64_t floats);

// A block of at least `floats` floats, 64-byte aligned, contents undefined, given back at the end of the
// scope.
class Scratch {
 public:
  explicit Scratch(int64_t floats);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  [[nodiscard]] float* data() const { return data_; }

 private:
  float* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace godwit::kernels
