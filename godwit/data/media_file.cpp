#include "godwit/data/media_file.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "godwit/base/check.h"

namespace godwit::data {
namespace {

constexpr char kMagic[8] = {'G', 'W', 'M', 'E', 'D', 'I', 'A', '\0'};
constexpr uint32_t kVersion = 1;

struct Header {
  char magic[8] = {};
  uint32_t version = {};
  uint32_t zero = {};
  uint64_t items = {};
  uint64_t frames = {};
  uint64_t data_bytes = {};
  uint64_t checksum = {};
  uint64_t more_zero = {};
  uint64_t header_checksum = {};
};
static_assert(sizeof(Header) == 64);

uint64_t header_checksum(const Header& header) {
  return io::xxh3(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, header_checksum)));
}

uint64_t padded(uint64_t bytes) {
  return (bytes + 7) / 8 * 8;
}

}  // namespace

MediaWriter::MediaWriter(fs::path path) : file_(std::move(path)) {
  const Header blank{};
  file_.append(std::as_bytes(std::span(&blank, 1)));
}

void MediaWriter::put(io::Bytes bytes) {
  checksum_.update(bytes);
  file_.append(bytes);
}

void MediaWriter::add(uint64_t document, const MediaEntry& entry) {
  items_.push_back({.document = document,
                    .token = entry.token,
                    .first_frame = frame_offsets_.size() - 1,
                    .tokens = entry.tokens,
                    .frames = static_cast<uint32_t>(entry.frames.size()),
                    .rows = entry.rows,
                    .columns = entry.columns});
  for (const std::string& frame : entry.frames) {
    put(io::as_bytes(frame));
    frame_offsets_.push_back(frame_offsets_.back() + frame.size());
  }
}

uint64_t MediaWriter::finish() {
  constexpr std::byte kZeros[8] = {};
  put(std::span(kZeros).first(padded(frame_offsets_.back()) - frame_offsets_.back()));
  put(std::as_bytes(std::span(frame_offsets_)));
  put(std::as_bytes(std::span(items_)));
  Header header{.version = kVersion,
                .items = items_.size(),
                .frames = frame_offsets_.size() - 1,
                .data_bytes = frame_offsets_.back(),
                .checksum = checksum_.digest()};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.header_checksum = header_checksum(header);
  file_.write_at(0, std::as_bytes(std::span(&header, 1)));
  file_.commit();
  return header.checksum;
}

MediaFile::MediaFile(fs::path path) : file_(std::move(path)) {
  const std::string where = file_.path().string();
  Header header;
  check(file_.size() >= sizeof header, "{}: {} bytes are too few for a media file", where, file_.size());
  std::memcpy(&header, file_.bytes().data(), sizeof header);
  check(std::equal(std::begin(kMagic), std::end(kMagic), header.magic), "{}: not a media file (wrong magic)",
        where);
  check(header.version == kVersion, "{}: version {} of the format, expected {}", where, header.version,
        kVersion);
  check(header.header_checksum == header_checksum(header), "{}: the header is damaged (checksum)", where);
  constexpr uint64_t kMost = uint64_t{1} << 56;  // no overflow below
  check(header.items < kMost && header.frames < kMost && header.data_bytes < kMost, "{}: impossible counts",
        where);
  const uint64_t data = padded(header.data_bytes), offsets = 8 * (header.frames + 1);
  const uint64_t expected = sizeof header + data + offsets + sizeof(MediaRecord) * header.items;
  check(file_.size() == expected, "{}: {} bytes, expected {}: truncated?", where, file_.size(), expected);
  const std::byte* at = file_.bytes().data() + sizeof header + data;
  frame_offsets_ = {reinterpret_cast<const uint64_t*>(at), header.frames + 1};
  items_ = {reinterpret_cast<const MediaRecord*>(at + offsets), header.items};
  checksum_ = header.checksum;
  check(frame_offsets_.front() == 0 && frame_offsets_.back() == header.data_bytes &&
            std::ranges::is_sorted(frame_offsets_),
        "{}: the offsets of the pictures are damaged", where);
  const bool sound = std::ranges::all_of(items_, [&](const MediaRecord& item) {
    return item.frames > 0 && item.first_frame <= header.frames &&
           item.frames <= header.frames - item.first_frame;
  });
  check(sound && std::ranges::is_sorted(items_, {},
                                        [](const MediaRecord& i) { return std::pair(i.document, i.token); }),
        "{}: the table of pictures is damaged", where);
}

std::span<const MediaRecord> MediaFile::items(uint64_t document) const {
  const auto first = std::ranges::lower_bound(items_, document, {}, &MediaRecord::document);
  const auto last = std::ranges::upper_bound(items_, document, {}, &MediaRecord::document);
  return {first, last};
}

io::Bytes MediaFile::frame(uint64_t number) const {
  const uint64_t begin = frame_offsets_[number];
  return file_.bytes().subspan(sizeof(Header) + begin, frame_offsets_[number + 1] - begin);
}

void MediaFile::verify() const {
  const uint64_t found = io::xxh3(file_.bytes().subspan(sizeof(Header)));
  check(found == checksum_, "{}: damaged: checksum {}, expected {}", path().string(), io::hex64(found),
        io::hex64(checksum_));
}

}  // namespace godwit::data
