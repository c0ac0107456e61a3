// Text to token shards: what `godwit data pack` does.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/data/sample.h"
#include "godwit/io/file.h"

namespace godwit::data {

namespace fs = std::filesystem;

// What packing needs to know of a tokenizer.
struct PackTokenizer {
  // Appends the ids of plain text (no special tokens out of it). Called from several threads at once.
  std::function<void(std::string_view text, std::vector<int32_t>& ids)> encode;
  // A document of JSON as tokens. None: such documents are refused.
  std::function<ChatSample(const Document& document)> encode_chat = {};
  int64_t vocab_size = 0;
  int32_t eos_id = 0;                  // put after every document
  std::optional<int32_t> bos_id = {};  // put before every document, if given
  std::string hash;                    // goes into the manifest; data of different tokenizers does not mix
};

struct PackOptions {
  std::vector<fs::path> inputs;  // see documents.h
  fs::path out;                  // a directory that appears at the end
  bool replace = false;          // an existing one
  double holdout = 0;            // share of the text to hold out, in [0, 1)
  uint64_t shard_tokens = uint64_t{1} << 28;
  PackTokenizer tokenizer;
  io::ImageProcessorConfig processor = {};  // of the pictures; goes into the output where there are some
  std::function<void(uint64_t done, uint64_t total)> progress = {};  // bytes of the input files; may be empty
};

struct SplitSummary {
  uint64_t documents = 0, tokens = 0;
  uint64_t text_bytes = 0;  // of conversations: of what the assistant wrote
  uint64_t media = 0;       // pictures, and frames of videos that become vectors together
};

struct PackSummary {
  SplitSummary train, heldout;
  uint64_t empty_documents = 0;  // passed over
  // How documents were held out: by the hash of the text; where that would choose fewer than kFewDocuments
  // (of conversations: none, which is an Error), one whole document, the shortest that has the share (and at
  // most twice it); where there is none, the last part of each document.
  enum class Holdout { kNone, kByHash, kDocument, kTails } rule = Holdout::kNone;
};

inline constexpr uint64_t kFewDocuments = 16;

// Without a held-out part writes out/manifest.json and out/shard-*.gwt; with one out/train/ and out/heldout/
// of that kind, out/heldout.txt (the bytes of the held-out text, one document after another) and
// out/manifest.json that says how it was chosen. The same inputs give the same bytes, whatever the number of
// threads. No text at all is an Error.
PackSummary pack_corpus(const PackOptions& options);

}  // namespace godwit::data
