// A run of sequences made in the background, while the device works on those before.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "godwit/data/packed_batch.h"

namespace godwit::data {

// Not safe to use from several threads.
class SequencesAhead {
 public:
  using Make = std::function<PackedBatch(uint64_t n)>;  // called from several threads

  SequencesAhead() = default;
  ~SequencesAhead() { wait(); }
  SequencesAhead(const SequencesAhead&) = delete;
  SequencesAhead& operator=(const SequencesAhead&) = delete;

  // Begins to make sequences first .. first + count; what was made before and not taken is dropped. Nothing
  // happens where these are being made already.
  void start(uint64_t first, uint64_t count, int threads, const Make& make);
  // Sequence n, waiting for the run to be whole; none when it is not in it, was taken, or could not be made
  // (the caller then makes it and meets the error).
  std::optional<PackedBatch> take(uint64_t n);

 private:
  void wait();

  uint64_t first_ = 0;
  std::vector<std::optional<PackedBatch>> made_;
  std::atomic<size_t> next_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace godwit::data
