// The tokenizer of the K3 family: byte-level BPE in tiktoken's file format, the K3 split pattern
// (pretokenize.h) and 256 special tokens on top of the ranks. A vocabulary of R ranks has ids 0..R-1 for
// ranks and R..R+255 for specials; K3 has R = 163,584. A trained, smaller vocabulary has the same specials in
// the same order.
//
//   auto tokenizer = Tokenizer::load("model_directory");
//   std::vector<int32_t> ids = tokenizer.encode("text");
//   std::string text = tokenizer.decode(ids);
//
// A Tokenizer does not change after it is made and may be used from any number of threads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "godwit/text/bpe.h"

namespace godwit {

inline constexpr int32_t kSpecialTokens = 256;

// Names of K3's special tokens that code refers to.
inline constexpr std::string_view kBos = "[BOS]";
inline constexpr std::string_view kEos = "[EOS]";
inline constexpr std::string_view kPad = "[PAD]";
inline constexpr std::string_view kUnk = "[UNK]";
inline constexpr std::string_view kEndOfMsg = "<|end_of_msg|>";
inline constexpr std::string_view kOpen = "<|open|>";
inline constexpr std::string_view kClose = "<|close|>";
inline constexpr std::string_view kSep = "<|sep|>";
inline constexpr std::string_view kMediaBegin = "<|media_begin|>";
inline constexpr std::string_view kMediaContent = "<|media_content|>";
inline constexpr std::string_view kMediaEnd = "<|media_end|>";
inline constexpr std::string_view kMediaPad = "<|media_pad|>";

// What becomes of bytes that are not UTF-8.
enum class InvalidUtf8 {
  kKeep,      // lossless: split as if U+FFFD stood there, encoded as the bytes they are
  kReplace,   // U+FFFD for each maximal invalid subpart: what tiktoken gives for
              // bytes.decode(errors="replace")
  kTiktoken,  // lossless, as tiktoken's _encode_bytes: from the last piece before the first fault to the end
              // is one piece
};

struct EncodeOptions {
  InvalidUtf8 invalid = InvalidUtf8::kKeep;
  // Cut very long texts and runs first (cut_long_text), as K3's released tokenizer does and tiktoken alone
  // does not.
  bool cut_long = false;
};

class Tokenizer {
 public:
  // A directory with tiktoken.model and, if there, tokenizer_config.json for the names of the specials; or a
  // rank file alone. Throws Error with file and line (rank file) or key (configuration) of what is wrong.
  static Tokenizer load(const std::string& path);
  // Tokens in rank order, as parse_ranks and BpeTrainer give them.
  static Tokenizer from_ranks(std::vector<std::string> tokens);
  // Writes tiktoken.model and tokenizer_config.json; the directory is made if it is not there.
  void save(const std::string& directory, int64_t model_max_length = 1 << 20) const;

  // Text to ids; never gives a special id, whatever the text: "<|end_of_msg|>" is encoded as the letters it
  // has.
  std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const;
  void encode_append(std::string_view text, std::vector<int32_t>& ids, EncodeOptions options = {}) const;
  // The same, but the names of special tokens in `text` become their ids. For control strings only, never for
  // user text.
  std::vector<int32_t> encode_with_specials(std::string_view text, EncodeOptions options = {}) const;

  // Ids to bytes; specials become their names, or nothing with skip_specials. Any id outside
  // 0..vocab_size()-1 is an Error. Bytes need not be UTF-8 when the ids are arbitrary: see StreamDecoder and
  // replace_invalid_utf8.
  std::string decode(std::span<const int32_t> ids, bool skip_specials = false) const;
  std::string_view token_bytes(int32_t id) const;
  // Bytes of the longest token: a text has at least its bytes divided by these tokens.
  size_t longest_token() const { return longest_token_; }

  int32_t vocab_size() const { return ranks() + kSpecialTokens; }
  int32_t ranks() const { return static_cast<int32_t>(tokens_.size()) - kSpecialTokens; }
  bool is_special(int32_t id) const { return id >= ranks() && id < vocab_size(); }
  int32_t special_id(std::string_view name) const;  // Error if there is none of that name
  std::optional<int32_t> find_special(std::string_view name) const;

 private:
  Tokenizer(std::vector<std::string> rank_tokens,
            const std::unordered_map<int32_t, std::string>& special_names);
  void encode_part(std::string_view text, std::vector<int32_t>& ids, InvalidUtf8 invalid) const;
  void encode_part_with_specials(std::string_view text, std::vector<int32_t>& ids, InvalidUtf8 invalid) const;
  void encode_bytes_like_tiktoken(std::string_view text, std::vector<int32_t>& ids) const;

  std::vector<std::string> tokens_;  // bytes by id, specials last
  Bpe bpe_;
  size_t longest_token_ = 0;
  std::unordered_map<std::string, int32_t> special_ids_;
  std::vector<size_t> special_lengths_;  // distinct, longest first
  bool special_begins_with_[256] = {};
};

}  // namespace godwit
