// Stretches of documents, one after another, with the targets of next-token prediction.
#pragma once

#include <cstdint>
#include <vector>

#include "godwit/data/dataset.h"
#include "godwit/io/image_processor.h"

namespace godwit::data {

inline constexpr int64_t kNoTarget = -100;

struct Piece {
  int64_t entry;      // of the loader's mix; 0 elsewhere
  uint64_t document;  // of its data set
  uint64_t offset;    // of the first token in the document

  bool operator==(const Piece&) const = default;
};

// A picture, or frames of a video that become vectors together, in a batch. A document that the end of a
// sequence cuts may leave only some of its vectors there; the patches are all there.
struct MediaPiece {
  int64_t frames, rows, columns;  // patches
  int64_t first, count;           // of its vectors

  bool operator==(const MediaPiece&) const = default;
};

// T tokens in N pieces. None of the pieces is empty; no target crosses the end of a document.
struct PackedBatch {
  std::vector<int64_t> ids;      // [T]
  std::vector<int64_t> targets;  // [T], the next token of the same document (also where a piece stops before
                                 // the document does); kNoTarget after its last one and where the loss is
                                 // not to see the next token
  std::vector<int64_t> cu_seqlens{0};  // [N + 1], piece n holds the tokens cu_seqlens[n] .. cu_seqlens[n + 1]
  std::vector<Piece> pieces;           // [N]
  std::vector<MediaPiece> media;       // in the order of their placeholders
  std::vector<uint8_t> pixels;         // of all of them, [P, 3, p, p]
  io::PixelValues values{};            // what the bytes stand for, where there are some

  void append(const TokenDataset& dataset, int64_t entry, const Segment& segment);
};

}  // namespace godwit::data
