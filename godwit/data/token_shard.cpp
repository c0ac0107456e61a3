#include "godwit/data/token_shard.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/io/jsonl.h"

namespace godwit::data {
namespace {

constexpr char kMagic[8] = {'G', 'W', 'T', 'O', 'K', 'E', 'N', 'S'};
constexpr uint32_t kVersion = 1, kMaskedVersion = 2;
constexpr std::string_view kFormat = "godwit-tokens";

struct Header {
  char magic[8] = {};
  uint32_t version = {};
  uint32_t token_bytes = {};
  uint64_t vocab_size = {};
  uint64_t tokens = {};
  uint64_t documents = {};
  uint64_t text_bytes = {};
  uint64_t checksum = {};
  uint64_t header_checksum = {};
};

// Offsets must begin with 0, never fall, and end with `total`.
void check_offsets(std::span<const uint64_t> offsets, uint64_t total, std::string_view what,
                   const fs::path& path) {
  const bool sound = offsets.front() == 0 && offsets.back() == total && std::ranges::is_sorted(offsets);
  check(sound, "{}: the {} offsets of the documents are damaged", path.string(), what);
}

template <class T>
uint64_t sum_of(const std::vector<ShardInfo>& shards, T ShardInfo::*member) {
  return std::accumulate(shards.begin(), shards.end(), uint64_t{0},
                         [&](uint64_t sum, const ShardInfo& s) { return sum + s.*member; });
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

}  // namespace

uint64_t Manifest::tokens() const {
  return sum_of(shards, &ShardInfo::tokens);
}
uint64_t Manifest::documents() const {
  return sum_of(shards, &ShardInfo::documents);
}
uint64_t Manifest::text_bytes() const {
  return sum_of(shards, &ShardInfo::text_bytes);
}

int token_bytes_for(int64_t vocab_size) {
  return vocab_size <= 65536 ? 2 : 4;
}

Manifest read_manifest(const fs::path& directory) {
  const fs::path path = directory / kManifestFile;
  const nlohmann::json json = io::read_json(path);
  Manifest manifest;
  try {
    check(json.at("format") == kFormat && json.at("version") == kVersion,
          "{}: expected format {} version {}, got {} version {}", path.string(), kFormat, kVersion,
          json.at("format").dump(), json.at("version").dump());
    manifest.tokenizer_hash = json.at("tokenizer").at("hash").get<std::string>();
    manifest.vocab_size = json.at("tokenizer").at("vocab_size").get<int64_t>();
    manifest.eos_id = json.at("eos_id").get<int64_t>();
    if (!json.at("bos_id").is_null()) manifest.bos_id = json.at("bos_id").get<int64_t>();
    for (const auto& entry : json.at("shards")) {
      ShardInfo shard{entry.at("file").get<std::string>(), entry.at("tokens").get<uint64_t>(),
                      entry.at("documents").get<uint64_t>(), entry.at("text_bytes").get<uint64_t>(),
                      io::parse_hex64(entry.at("xxh3").get<std::string>(), path.string() + ": xxh3")};
      if (const auto media = entry.find("media"); media != entry.end()) {
        shard.media = media->at("file").get<std::string>();
        shard.media_checksum =
            io::parse_hex64(media->at("xxh3").get<std::string>(), path.string() + ": xxh3");
      }
      check(is_plain_name(shard.file) && (shard.media.empty() || is_plain_name(shard.media)),
            "{}: a shard outside the directory: {}", path.string(), entry.dump());
      manifest.shards.push_back(std::move(shard));
    }
    check(manifest.tokens() == json.at("tokens").get<uint64_t>() &&
              manifest.documents() == json.at("documents").get<uint64_t>() &&
              manifest.text_bytes() == json.at("text_bytes").get<uint64_t>(),
          "{}: the totals are not the sums of the shards", path.string());
  } catch (const nlohmann::json::exception& error) {
    fail("{}: not a manifest of token shards: {}", path.string(), error.what());
  }
  return manifest;
}

void write_manifest(const fs::path& directory, const Manifest& manifest) {
  nlohmann::ordered_json json;
  json["format"] = kFormat;
  json["version"] = kVersion;
  json["tokenizer"] = {{"hash", manifest.tokenizer_hash}, {"vocab_size", manifest.vocab_size}};
  json["eos_id"] = manifest.eos_id;
  json["bos_id"] = nullptr;
  if (manifest.bos_id) json["bos_id"] = *manifest.bos_id;
  json["token_bytes"] = token_bytes_for(manifest.vocab_size);
  json["documents"] = manifest.documents();
  json["tokens"] = manifest.tokens();
  json["text_bytes"] = manifest.text_bytes();
  json["shards"] = nlohmann::ordered_json::array();
  for (const auto& shard : manifest.shards) {
    json["shards"].push_back({{"file", shard.file},
                              {"documents", shard.documents},
                              {"tokens", shard.tokens},
                              {"text_bytes", shard.text_bytes},
                              {"xxh3", io::hex64(shard.checksum)}});
    if (!shard.media.empty())
      json["shards"].back()["media"] = {{"file", shard.media}, {"xxh3", io::hex64(shard.media_checksum)}};
  }
  io::write_file_atomic(directory / kManifestFile, json.dump(2) + "\n");
}

ShardWriter::ShardWriter(fs::path path, int64_t vocab_size)
    : file_(std::move(path)), vocab_size_(vocab_size), token_bytes_(token_bytes_for(vocab_size)) {
  check(vocab_size > 0 && vocab_size <= std::numeric_limits<int32_t>::max(), "{}: a vocabulary of {}",
        file_.path().string(), vocab_size);
}

void ShardWriter::add_document(std::span<const int32_t> ids, uint64_t text_bytes,
                               std::span<const uint8_t> trained) {
  check(trained.empty() || trained.size() == ids.size(), "{}: {} tokens with {} marks of the loss",
        file_.path().string(), ids.size(), trained.size());
  for (const int32_t id : ids) {
    check(id >= 0 && id < vocab_size_, "{}: token id {} of document {} is outside the vocabulary of {}",
          file_.path().string(), id, token_offsets_.size() - 1, vocab_size_);
  }
  if (token_bytes_ == 2) {
    narrow_.assign(ids.begin(), ids.end());
    file_.put(std::as_bytes(std::span(narrow_)));
  } else {
    file_.put(std::as_bytes(ids));
  }
  for (size_t i = 0; i < trained.size(); ++i) {
    if (trained[i]) continue;
    const uint64_t at = token_offsets_.back() + i;
    mask_.resize(std::max<size_t>(mask_.size(), at / 8 + 1), 0xFF);
    mask_[at / 8] &= static_cast<uint8_t>(~(1u << (at % 8)));
    masked_ = true;
  }
  token_offsets_.push_back(token_offsets_.back() + ids.size());
  text_offsets_.push_back(text_offsets_.back() + text_bytes);
}

ShardInfo ShardWriter::finish() {
  file_.pad(tokens() * static_cast<uint64_t>(token_bytes_));
  file_.put(std::as_bytes(std::span(token_offsets_)));
  file_.put(std::as_bytes(std::span(text_offsets_)));
  if (masked_) {
    mask_.resize(padded((tokens() + 7) / 8), 0xFF);
    for (uint64_t bit = tokens(); bit < 8 * mask_.size(); ++bit)
      mask_[bit / 8] &= static_cast<uint8_t>(~(1u << (bit % 8)));
    file_.put(std::as_bytes(std::span(mask_)));
  }
  const Header header{.version = masked_ ? kMaskedVersion : kVersion,
                      .token_bytes = static_cast<uint32_t>(token_bytes_),
                      .vocab_size = static_cast<uint64_t>(vocab_size_),
                      .tokens = tokens(),
                      .documents = documents(),
                      .text_bytes = text_offsets_.back()};
  const uint64_t checksum = file_.finish(kMagic, header);
  return {file_.path().filename().string(), header.tokens, header.documents, header.text_bytes, checksum};
}

TokenShard::TokenShard(fs::path path) : file_(std::move(path)) {
  const std::string where = file_.path().string();
  const auto header = read_header<Header>(file_, kMagic, kMaskedVersion, "a token shard");
  check(header.vocab_size > 0 && header.vocab_size <= std::numeric_limits<int32_t>::max() &&
            static_cast<int>(header.token_bytes) == token_bytes_for(static_cast<int64_t>(header.vocab_size)),
        "{}: {} bytes a token for a vocabulary of {}", where, header.token_bytes, header.vocab_size);
  constexpr uint64_t kMost = uint64_t{1} << 58;  // no overflow below
  check(header.tokens < kMost && header.documents < kMost, "{}: impossible counts", where);
  const uint64_t token_area = padded(header.tokens * header.token_bytes);
  const uint64_t offset_area = 16 * (header.documents + 1);
  const uint64_t mask_area = header.version == kMaskedVersion ? padded((header.tokens + 7) / 8) : 0;
  const uint64_t expected = sizeof header + token_area + offset_area + mask_area;
  check(file_.size() == expected, "{}: {} bytes, {} tokens of {} documents need {}: truncated?", where,
        file_.size(), header.tokens, header.documents, expected);
  const auto* offsets = reinterpret_cast<const uint64_t*>(file_.bytes().data() + sizeof header + token_area);
  token_offsets_ = {offsets, header.documents + 1};
  text_offsets_ = {offsets + header.documents + 1, header.documents + 1};
  mask_ = file_.bytes().subspan(sizeof header + token_area + offset_area, mask_area);
  check_offsets(token_offsets_, header.tokens, "token", file_.path());
  check_offsets(text_offsets_, header.text_bytes, "text", file_.path());
  vocab_size_ = static_cast<int64_t>(header.vocab_size);
  token_bytes_ = static_cast<int>(header.token_bytes);
  checksum_ = header.checksum;
}

void TokenShard::copy_tokens(uint64_t document, uint64_t begin, std::span<int64_t> out) const {
  const uint64_t at = token_offsets_[document] + begin;
  const std::byte* tokens = file_.bytes().data() + sizeof(Header);
  if (token_bytes_ == 2) {
    std::copy_n(reinterpret_cast<const uint16_t*>(tokens) + at, out.size(), out.begin());
  } else {
    std::copy_n(reinterpret_cast<const uint32_t*>(tokens) + at, out.size(), out.begin());
  }
  const bool inside = std::ranges::all_of(out, [&](int64_t id) { return id < vocab_size_; });
  check(inside, "{}: document {} has a token outside the vocabulary of {}: damaged?", path().string(),
        document, vocab_size_);
}

void TokenShard::copy_trained(uint64_t document, uint64_t begin, std::span<uint8_t> out) const {
  const uint64_t at = token_offsets_[document] + begin;
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t bit = at + i;
    out[i] = mask_.empty() || (std::to_integer<uint32_t>(mask_[bit / 8]) >> (bit % 8) & 1u) != 0;
  }
}

void TokenShard::verify() const {
  verify_body(file_, checksum_);
}

}  // namespace godwit::data
