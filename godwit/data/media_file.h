// The pictures of one token shard, as encoded files: what the placeholders of its documents stand for.
//
// media-00000.gwm, little-endian, used as mapped:
//   0   char magic[8]    "GWMEDIA\0"
//   8   u32 version      1
//   12  u32 zero
//   16  u64 items        pictures, or frames of a video that become vectors together
//   24  u64 frames
//   32  u64 data_bytes
//   40  u64 checksum     XXH3 of everything after the header
//   48  u64 zero
//   56  u64              XXH3 of the 56 bytes before
//   64  encoded pictures one after another, then zeros up to a multiple of 8
//       u64 frame_offset[frames + 1]
//       item[items]      in the order of the tokens
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/data/checked_file.h"

namespace godwit::data {

namespace fs = std::filesystem;

struct MediaRecord {
  uint64_t document;     // of the shard
  uint64_t token;        // its first placeholder, in the document
  uint64_t first_frame;  // of the file
  uint32_t tokens;
  uint32_t frames;
  uint32_t rows, columns;  // of a frame, in patches
};
static_assert(sizeof(MediaRecord) == 40);

// An item on its way into a shard.
struct MediaEntry {
  uint64_t token = 0;
  uint32_t tokens = 0;
  uint32_t rows = 0, columns = 0;
  std::vector<std::string> frames = {};  // encoded
};

class MediaWriter {
 public:
  explicit MediaWriter(fs::path path);
  void add(uint64_t document, const MediaEntry& entry);
  uint64_t finish();  // the checksum

 private:
  CheckedWriter file_;
  std::vector<uint64_t> frame_offsets_{0};
  std::vector<MediaRecord> items_;
};

class MediaFile {
 public:
  // Checks header, size and tables (not the checksum: verify()).
  explicit MediaFile(fs::path path);

  // Those of one document.
  std::span<const MediaRecord> items(uint64_t document) const;
  std::span<const MediaRecord> all() const { return items_; }
  io::Bytes frame(uint64_t number) const;
  uint64_t checksum() const { return checksum_; }
  const fs::path& path() const { return file_.path(); }
  void verify() const;

 private:
  io::MappedFile file_;
  std::span<const uint64_t> frame_offsets_;
  std::span<const MediaRecord> items_;
  uint64_t checksum_ = 0;
};

}  // namespace godwit::data
