#include "godwit/train/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "godwit/base/check.h"

namespace godwit {
namespace {

static_assert(std::endian::native == std::endian::little, "the records are little-endian");

constexpr std::array<uint32_t, 256> make_crc_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78U : 0U);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kCrcTable = make_crc_table();

template <class T>
void put_raw(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

// Protobuf wire types: 0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes.
void put_key(std::string& out, int field, int wire_type) {
  put_varint(out, (field << 3) | wire_type);
}

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_key(out, field, 2);
  put_varint(out, bytes.size());
  out += bytes;
}

std::string record(std::string_view data) {
  std::string length;
  put_raw(length, static_cast<uint64_t>(data.size()));
  std::string out = length;
  put_raw(out, masked_crc32c(length));
  out += data;
  put_raw(out, masked_crc32c(data));
  return out;
}

std::string event(double wall_time, int64_t step) {
  std::string out;
  put_key(out, 1, 1);
  put_raw(out, wall_time);
  if (step != 0) {
    put_key(out, 2, 0);
    put_varint(out, static_cast<uint64_t>(step));
  }
  return out;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0U;
  for (const char c : bytes) crc = kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

uint32_t masked_crc32c(std::string_view bytes) {
  return std::rotr(crc32c(bytes), 15) + 0xa282ead8U;
}

std::string version_record(double wall_time) {
  std::string data = event(wall_time, 0);
  put_bytes(data, 3, "brain.Event:2");
  return record(data);
}

std::string start_record(double wall_time, int64_t step) {
  std::string data = event(wall_time, step);
  put_bytes(data, 7, std::string("\x08\x01", 2));  // status = START
  return record(data);
}

std::string scalars_record(double wall_time, int64_t step, const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, value] : scalars) {
    std::string item;
    put_bytes(item, 1, tag);
    put_key(item, 2, 5);
    put_raw(item, value);
    put_bytes(summary, 1, item);
  }
  std::string data = event(wall_time, step);
  put_bytes(data, 5, summary);
  return record(data);
}

EventWriter::~EventWriter() {
  restart();
}

void EventWriter::restart() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void EventWriter::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    check(written > 0, "{}: cannot be written: {}", path_.string(), std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void EventWriter::write(int64_t step, const Scalars& scalars) {
  const double now = wall_seconds();
  if (fd_ < 0) {
    std::filesystem::create_directories(directory_);
    // TensorBoard reads any file with "tfevents" in its name, in the order of the names.
    path_ = directory_ / fmt::format("events.out.tfevents.{:.6f}.{}", now, ::getpid());
    fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    check(fd_ >= 0, "{}: cannot be created: {}", path_.string(), std::strerror(errno));
    append(version_record(now) + start_record(now, step));
  }
  append(scalars_record(now, step, scalars));
}

}  // namespace godwit
