#include "godwit/data/media_file.h"

#include <algorithm>
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
}  // namespace

MediaWriter::MediaWriter(fs::path path) : file_(std::move(path)) {}

void MediaWriter::add(uint64_t document, const MediaEntry& entry) {
  items_.push_back({.document = document,
                    .token = entry.token,
                    .first_frame = frame_offsets_.size() - 1,
                    .tokens = entry.tokens,
                    .frames = static_cast<uint32_t>(entry.frames.size()),
                    .rows = entry.rows,
                    .columns = entry.columns});
  for (const std::string& frame : entry.frames) {
    file_.put(io::as_bytes(frame));
    frame_offsets_.push_back(frame_offsets_.back() + frame.size());
  }
}

uint64_t MediaWriter::finish() {
  file_.pad(frame_offsets_.back());
  file_.put(std::as_bytes(std::span(frame_offsets_)));
  file_.put(std::as_bytes(std::span(items_)));
  return file_.finish(kMagic, Header{.version = kVersion,
                                     .items = items_.size(),
                                     .frames = frame_offsets_.size() - 1,
                                     .data_bytes = frame_offsets_.back()});
}

MediaFile::MediaFile(fs::path path) : file_(std::move(path)) {
  const std::string where = file_.path().string();
  const auto header = read_header<Header>(file_, kMagic, kVersion, "a media file");
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
  verify_body(file_, checksum_);
}

}  // namespace godwit::data
