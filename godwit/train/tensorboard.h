// TensorBoard event files, without TensorBoard: a sequence of records
//   uint64 length, uint32 masked crc32c of those 8 bytes, data, uint32 masked crc32c of data (little-endian;
//   TFRecord)
// each of them a protobuf Event {1: double wall_time, 2: int64 step, 3: string file_version, 5: Summary, 7:
// SessionLog}, Summary {1: repeated Value {1: string tag, 2: float simple_value}}, SessionLog {1: enum
// status, START = 1}.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace godwit {

// CRC-32C (Castagnoli), and TFRecord's masking of it.
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);

using Scalars = std::vector<std::pair<std::string, float>>;  // tag, value

// Bytes of the records. The first one of a file names its version; a start record at a step makes TensorBoard
// drop what earlier files of the directory say of that step and later ones.
std::string version_record(double wall_time);
std::string start_record(double wall_time, int64_t step);
std::string scalars_record(double wall_time, int64_t step, const Scalars& scalars);

// One event file in `directory`, begun at the first write.
class EventWriter {
 public:
  explicit EventWriter(std::filesystem::path directory) : directory_(std::move(directory)) {}
  ~EventWriter();
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  void write(int64_t step, const Scalars& scalars);
  // The next write begins a new file, at its step.
  void restart();

 private:
  void append(std::string_view bytes);

  std::filesystem::path directory_, path_;
  int fd_ = -1;
};

}  // namespace godwit
