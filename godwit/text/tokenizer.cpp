#include "godwit/text/tokenizer.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/text/pretokenize.h"
#include "godwit/text/rank_file.h"
#include "godwit/text/utf8.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using SpecialNames = std::unordered_map<int32_t, std::string>;  // by offset from the first special id

constexpr const char* kRankFile = "tiktoken.model";
constexpr const char* kConfigFile = "tokenizer_config.json";

// K3's named specials; all others are <|reserved_token_ID|> with their absolute id.
const SpecialNames& k3_special_names() {
  static const SpecialNames names = {
      {0, std::string(kBos)},         {1, std::string(kEos)},           {2, std::string(kEndOfMsg)},
      {3, std::string(kOpen)},        {4, std::string(kClose)},         {5, std::string(kSep)},
      {6, "[start_header_id]"},       {7, "[end_header_id]"},           {9, "[EOT]"},
      {18, std::string(kMediaBegin)}, {19, std::string(kMediaContent)}, {20, std::string(kMediaEnd)},
      {21, std::string(kMediaPad)},   {65, "<osagent_mode>"},           {254, std::string(kUnk)},
      {255, std::string(kPad)},
  };
  return names;
}

// added_tokens_decoder of a Hugging Face tokenizer_config.json: {"163586": {"content": "<|end_of_msg|>",
// ...}, ...}
SpecialNames read_special_names(const std::string& path, int32_t ranks) {
  nlohmann::json config;
  try {
    config = nlohmann::json::parse(read_regular_file(path));
  } catch (const nlohmann::json::exception& error) {
    fail("{}: invalid JSON: {}", path, error.what());
  }
  const auto added = config.find("added_tokens_decoder");
  if (added == config.end()) return k3_special_names();
  check(added->is_object(), "{}: added_tokens_decoder: expected an object", path);
  SpecialNames names;
  for (const auto& [key, value] : added->items()) {
    int32_t id = 0;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
    check(error == std::errc() && end == key.data() + key.size(),
          "{}: added_tokens_decoder: '{}' is not a token id", path, key);
    check(id >= ranks && id < ranks + kSpecialTokens,
          "{}: added_tokens_decoder: id {} is outside {}..{}, the specials above the {} ranks of {}: is that "
          "file truncated?",
          path, id, ranks, ranks + kSpecialTokens - 1, ranks, kRankFile);
    check(value.is_object() && value.contains("content") && value["content"].is_string() &&
              !value["content"].get_ref<const std::string&>().empty(),
          "{}: added_tokens_decoder: {}: expected an object with the token's text as \"content\"", path, key);
    names[id - ranks] = value["content"];
  }
  return names;
}

bool is_blank(std::string_view token) {
  return token.find_first_not_of(" \n\t") == std::string_view::npos;
}

}  // namespace

Tokenizer::Tokenizer(std::vector<std::string> rank_tokens, const SpecialNames& special_names)
    : tokens_(std::move(rank_tokens)), bpe_(tokens_) {
  const auto base = static_cast<int32_t>(tokens_.size());
  for (int32_t offset = 0; offset < kSpecialTokens; ++offset) {
    const int32_t id = base + offset;
    const auto named = special_names.find(offset);
    const std::string name =
        named != special_names.end() ? named->second : fmt::format("<|reserved_token_{}|>", id);
    const auto [other, is_new] = special_ids_.emplace(name, id);
    check(is_new, "tokenizer: special tokens {} and {} have the same name '{}'", other->second, id, name);
    special_lengths_.push_back(name.size());
    special_begins_with_[static_cast<uint8_t>(name[0])] = true;
    tokens_.push_back(name);
  }
  for (const std::string& token : tokens_) longest_token_ = std::max(longest_token_, token.size());
  std::sort(special_lengths_.begin(), special_lengths_.end(), std::greater<>());
  special_lengths_.erase(std::unique(special_lengths_.begin(), special_lengths_.end()),
                         special_lengths_.end());
}

Tokenizer Tokenizer::from_ranks(std::vector<std::string> tokens) {
  return Tokenizer(std::move(tokens), k3_special_names());
}

Tokenizer Tokenizer::load(const std::string& path) {
  const bool is_directory = fs::is_directory(path);
  const std::string rank_file = is_directory ? (fs::path(path) / kRankFile).string() : path;
  std::vector<std::string> tokens = parse_ranks(read_regular_file(rank_file), rank_file);
  const std::string config_file = (fs::path(path) / kConfigFile).string();
  if (!is_directory || !fs::exists(config_file)) return from_ranks(std::move(tokens));
  const SpecialNames names = read_special_names(config_file, static_cast<int32_t>(tokens.size()));
  return Tokenizer(std::move(tokens), names);
}

void Tokenizer::save(const std::string& directory, int64_t model_max_length) const {
  std::error_code error;
  fs::create_directories(directory, error);
  check(!error, "{}: cannot make the directory: {}", directory, error.message());
  nlohmann::ordered_json added = nlohmann::ordered_json::object();
  for (int32_t id = ranks(); id < vocab_size(); ++id) {
    if (token_bytes(id) == fmt::format("<|reserved_token_{}|>", id)) continue;
    added[std::to_string(id)] = {{"content", token_bytes(id)}, {"lstrip", false},
                                 {"normalized", false},        {"rstrip", false},
                                 {"single_word", false},       {"special", true}};
  }
  nlohmann::ordered_json config = {{"tokenizer_class", "TikTokenTokenizer"}};
  const std::pair<const char*, std::string_view> roles[] = {
      {"bos_token", kBos}, {"eos_token", kEos}, {"pad_token", kPad}, {"unk_token", kUnk}};
  for (const auto& [role, name] : roles) {
    if (find_special(name)) config[role] = name;
  }
  config["clean_up_tokenization_spaces"] = false;
  config["model_max_length"] = model_max_length;
  config["added_tokens_decoder"] = added;
  const std::vector<std::string> rank_tokens(tokens_.begin(), tokens_.begin() + ranks());
  write_file((fs::path(directory) / kRankFile).string(), format_ranks(rank_tokens));
  write_file((fs::path(directory) / kConfigFile).string(), config.dump(2) + "\n");
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 16);
  encode_append(text, ids, options);
  return ids;
}

void Tokenizer::encode_append(std::string_view text, std::vector<int32_t>& ids, EncodeOptions options) const {
  if (!options.cut_long) return encode_part(text, ids, options.invalid);
  for (const std::string_view part : cut_long_text(text)) encode_part(part, ids, options.invalid);
}

std::vector<int32_t> Tokenizer::encode_with_specials(std::string_view text, EncodeOptions options) const {
  std::vector<int32_t> ids;
  if (!options.cut_long) {
    encode_part_with_specials(text, ids, options.invalid);
    return ids;
  }
  for (const std::string_view part : cut_long_text(text))
    encode_part_with_specials(part, ids, options.invalid);
  return ids;
}

// Each stretch between two specials is a text of its own, as in tiktoken.
void Tokenizer::encode_part_with_specials(std::string_view text, std::vector<int32_t>& ids,
                                          InvalidUtf8 invalid) const {
  size_t begin = 0;
  for (size_t pos = 0; pos < text.size();) {
    std::optional<int32_t> special;
    size_t length = 0;
    if (special_begins_with_[static_cast<uint8_t>(text[pos])]) {
      for (size_t i = 0; i < special_lengths_.size() && !special; ++i) {
        length = special_lengths_[i];
        if (pos + length <= text.size()) special = find_special(text.substr(pos, length));
      }
    }
    if (!special) {
      ++pos;
      continue;
    }
    encode_part(text.substr(begin, pos - begin), ids, invalid);
    ids.push_back(*special);
    pos += length;
    begin = pos;
  }
  encode_part(text.substr(begin), ids, invalid);
}

void Tokenizer::encode_part(std::string_view text, std::vector<int32_t>& ids, InvalidUtf8 invalid) const {
  if (invalid == InvalidUtf8::kKeep) {
    bpe_.encode_text(text, ids);
  } else if (invalid == InvalidUtf8::kTiktoken) {
    encode_bytes_like_tiktoken(text, ids);
  } else if (valid_utf8_prefix(text) == text.size()) {
    bpe_.encode_text(text, ids);
  } else {
    bpe_.encode_text(replace_invalid_utf8(text), ids);
  }
}

// The valid prefix is encoded; the ids of its last piece, and of all white space before it if that piece
// begins with white space, are taken back; their bytes and all that follow the prefix are one piece.
void Tokenizer::encode_bytes_like_tiktoken(std::string_view text, std::vector<int32_t>& ids) const {
  const size_t before = ids.size();
  const size_t valid = valid_utf8_prefix(text);
  const size_t last = bpe_.encode_text(text.substr(0, valid), ids);
  if (valid == text.size()) return;
  size_t kept = ids.size() - last;
  if (last > 0 && is_blank(tokens_[ids[kept]])) {
    while (kept > before && is_blank(tokens_[ids[kept - 1]])) --kept;
  }
  size_t begin = valid;
  for (size_t i = kept; i < ids.size(); ++i) begin -= tokens_[ids[i]].size();
  ids.resize(kept);
  bpe_.encode_piece(text.substr(begin), ids);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_specials) const {
  std::string out;
  for (const int32_t id : ids) {
    const std::string_view bytes = token_bytes(id);
    if (!skip_specials || !is_special(id)) out += bytes;
  }
  return out;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  check(id >= 0 && id < vocab_size(), "token id {} is outside the vocabulary of {}", id, vocab_size());
  return tokens_[id];
}

int32_t Tokenizer::special_id(std::string_view name) const {
  const auto id = find_special(name);
  check(id.has_value(), "tokenizer: there is no special token '{}'", name);
  return *id;
}

std::optional<int32_t> Tokenizer::find_special(std::string_view name) const {
  const auto at = special_ids_.find(std::string(name));
  if (at == special_ids_.end()) return std::nullopt;
  return at->second;
}

}  // namespace godwit
