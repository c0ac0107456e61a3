#include "godwit/data/pack.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <system_error>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/data/documents.h"
#include "godwit/data/token_shard.h"

namespace godwit::data {
namespace {

constexpr size_t kBatchBytes = 16 << 20;  // text tokenised at once
constexpr size_t kBatchDocuments = 4096;

// A document is held out if its hash, read as a fraction, is below `share`. Copies of a document fall on the
// same side.
bool held_out_by_hash(std::string_view text, double share) {
  return static_cast<double>(io::xxh3(text) >> 11) * 0x1p-53 < share;
}

// Where the held-out tail of a document begins: at the start of a line if the tail has one, else of a UTF-8
// character.
size_t tail_begin(std::string_view text, double share) {
  const auto tail = static_cast<size_t>(std::ceil(static_cast<double>(text.size()) * share));
  size_t begin = text.size() - std::min(tail, text.size());
  if (begin == 0) return 0;
  const size_t newline = text.find('\n', begin - 1);
  if (newline != std::string_view::npos && newline + 1 < text.size()) return newline + 1;
  while (begin < text.size() && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) ++begin;
  return begin;
}

// How documents are held out; `document` counts those with text from 0.
struct Rule {
  PackSummary::Holdout kind = PackSummary::Holdout::kNone;
  uint64_t document = 0;
};

// The shards of one directory.
class SplitWriter {
 public:
  SplitWriter(fs::path directory, const PackOptions& options)
      : directory_(std::move(directory)), options_(options) {
    io::make_directories(directory_);
    manifest_.tokenizer_hash = options.tokenizer.hash;
    manifest_.vocab_size = options.tokenizer.vocab_size;
    manifest_.eos_id = options.tokenizer.eos_id;
    if (options.tokenizer.bos_id) manifest_.bos_id = *options.tokenizer.bos_id;
  }

  void add(std::span<const int32_t> ids, uint64_t text_bytes, std::span<const uint8_t> trained,
           const std::vector<MediaEntry>& media) {
    if (shard_ && shard_->tokens() + ids.size() > options_.shard_tokens) finish_shard();
    if (!shard_) {
      const std::string name = fmt::format("shard-{:05d}.gwt", manifest_.shards.size());
      shard_ = std::make_unique<ShardWriter>(directory_ / name, options_.tokenizer.vocab_size);
    }
    for (const MediaEntry& entry : media) {
      if (!media_) {
        media_name_ = fmt::format("media-{:05d}.gwm", manifest_.shards.size());
        media_ = std::make_unique<MediaWriter>(directory_ / media_name_);
      }
      media_->add(shard_->documents(), entry);
      ++media_items_;
    }
    shard_->add_document(ids, text_bytes, trained);
  }

  SplitSummary finish() {
    if (shard_) finish_shard();
    if (media_items_ > 0) save_image_processor(options_.processor, directory_);
    write_manifest(directory_, manifest_);
    return {manifest_.documents(), manifest_.tokens(), manifest_.text_bytes(), media_items_};
  }

 private:
  void finish_shard() {
    manifest_.shards.push_back(shard_->finish());
    shard_.reset();
    if (!media_) return;
    manifest_.shards.back().media = media_name_;
    manifest_.shards.back().media_checksum = media_->finish();
    media_.reset();
  }

  fs::path directory_;
  const PackOptions& options_;
  Manifest manifest_;
  std::unique_ptr<ShardWriter> shard_;
  std::unique_ptr<MediaWriter> media_;  // beside it, where its documents have pictures
  std::string media_name_;
  uint64_t media_items_ = 0;
};

// Collects documents, tokenises many at once, and writes them in the order they came.
class Packer {
 public:
  Packer(const PackOptions& options, const fs::path& directory, Rule rule)
      : options_(options),
        rule_(rule),
        train_(rule.kind == PackSummary::Holdout::kNone ? directory : directory / "train", options) {
    if (rule.kind == PackSummary::Holdout::kNone) return;
    heldout_ = std::make_unique<SplitWriter>(directory / "heldout", options);
    text_ = std::make_unique<io::AtomicFile>(directory / "heldout.txt");
  }

  void add(const Document& document) {
    const std::string_view text = document.text;
    const uint64_t index = documents_++;
    if (rule_.kind == PackSummary::Holdout::kTails) {
      const size_t cut = tail_begin(text, options_.holdout);
      queue({.text = text.substr(0, cut)}, /*heldout=*/false);
      queue({.text = text.substr(cut)}, /*heldout=*/true);
    } else {
      const bool by_hash = rule_.kind == PackSummary::Holdout::kByHash;
      queue(document, by_hash ? held_out_by_hash(text, options_.holdout)
                              : rule_.kind == PackSummary::Holdout::kDocument && index == rule_.document);
    }
  }

  void finish(PackSummary& summary) {
    flush();
    summary.train = train_.finish();
    if (!heldout_) return;
    summary.heldout = heldout_->finish();
    text_->commit();
  }

 private:
  struct Queued {
    std::string text;  // after encoding a document of JSON: what of it is trained
    Document document;
    bool heldout = false;
    std::vector<int32_t> ids = {};
    std::vector<uint8_t> trained = {};
    std::vector<MediaEntry> media = {};
  };

  void queue(const Document& document, bool heldout) {
    if (document.text.empty()) return;
    queue_.push_back({std::string(document.text), document, heldout});
    queued_bytes_ += document.text.size();
    if (document.members) {
      for (const auto& [name, bytes] : *document.members) queued_bytes_ += bytes.size();
    }
    if (queued_bytes_ >= kBatchBytes || queue_.size() >= kBatchDocuments) flush();
  }

  void encode(Queued& document) const {
    const PackTokenizer& tokenizer = options_.tokenizer;
    if (tokenizer.bos_id) document.ids.push_back(*tokenizer.bos_id);
    if (document.document.chat) {
      check(tokenizer.encode_chat != nullptr, "{}: a conversation, and this tokenizer has no chat format",
            document.document.where);
      document.document.text = document.text;
      ChatSample sample = tokenizer.encode_chat(document.document);
      for (MediaEntry& entry : sample.media) entry.token += document.ids.size();
      document.media = std::move(sample.media);
      document.trained.assign(document.ids.size(), 0);
      document.ids.insert(document.ids.end(), sample.ids.begin(), sample.ids.end());
      document.trained.insert(document.trained.end(), sample.trained.begin(), sample.trained.end());
      document.trained.push_back(sample.end_trained);  // a turn ends with a token of its own before [EOS]
      document.text = std::move(sample.trained_text);
    } else {
      tokenizer.encode(document.text, document.ids);
    }
    document.ids.push_back(tokenizer.eos_id);
  }

  void flush() {
    parallel_for(0, static_cast<int64_t>(queue_.size()), /*grain=*/1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) encode(queue_[i]);
    });
    for (const auto& document : queue_) {
      (document.heldout ? *heldout_ : train_)
          .add(document.ids, document.text.size(), document.trained, document.media);
      if (document.heldout) text_->append(document.text);
    }
    queue_.clear();
    queued_bytes_ = 0;
  }

  const PackOptions& options_;
  Rule rule_;
  uint64_t documents_ = 0;
  SplitWriter train_;
  std::unique_ptr<SplitWriter> heldout_;
  std::unique_ptr<io::AtomicFile> text_;
  std::vector<Queued> queue_;
  size_t queued_bytes_ = 0;
};

Rule choose_rule(const PackOptions& options, const std::vector<fs::path>& files) {
  if (options.holdout == 0) return {};
  uint64_t chosen = 0, chats = 0;
  std::vector<uint64_t> sizes;
  for (const auto& file : files) {
    read_documents(file, [&](const Document& document, uint64_t) {
      if (document.text.empty()) return;
      chosen += held_out_by_hash(document.text, options.holdout);
      chats += document.chat;
      sizes.push_back(document.text.size());
    });
    if (chosen >= kFewDocuments) return {.kind = PackSummary::Holdout::kByHash};
  }
  check(chats == 0 || chosen > 0, "data pack: holding out {} of {} conversations chooses none of them",
        options.holdout, chats);
  if (chats > 0) return {.kind = PackSummary::Holdout::kByHash};
  const double wanted =
      options.holdout * static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), uint64_t{0}));
  Rule best{.kind = PackSummary::Holdout::kTails};
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    const auto size = static_cast<double>(sizes[i]);
    if (size < wanted || size > 2 * wanted) continue;
    if (best.kind == PackSummary::Holdout::kTails || sizes[i] < sizes[best.document])
      best = {.kind = PackSummary::Holdout::kDocument, .document = i};
  }
  return best;
}

std::string_view describe(PackSummary::Holdout rule) {
  switch (rule) {
    case PackSummary::Holdout::kByHash:
      return "hash of the document";
    case PackSummary::Holdout::kDocument:
      return "one document";
    default:
      return "tail of each document";
  }
}

void write_split_manifest(const fs::path& directory, const PackOptions& options, const PackSummary& summary) {
  const auto part = [](std::string_view directory, const SplitSummary& s) {
    return nlohmann::ordered_json{{"directory", directory},
                                  {"documents", s.documents},
                                  {"tokens", s.tokens},
                                  {"text_bytes", s.text_bytes}};
  };
  nlohmann::ordered_json json;
  json["format"] = "godwit-corpus";
  json["version"] = 1;
  json["holdout"] = {{"share", options.holdout}, {"rule", describe(summary.rule)}, {"text", "heldout.txt"}};
  json["train"] = part("train", summary.train);
  json["heldout"] = part("heldout", summary.heldout);
  io::write_file_atomic(directory / kManifestFile, json.dump(2) + "\n");
}

void check_options(const PackOptions& options) {
  check(!options.inputs.empty(), "data pack: no input files");
  check(options.holdout >= 0 && options.holdout < 1,
        "data pack: the held-out share is {}, expected 0 <= share < 1", options.holdout);
  check(options.shard_tokens > 0, "data pack: shards of no tokens");
  const PackTokenizer& t = options.tokenizer;
  check(t.encode && t.eos_id >= 0 && t.eos_id < t.vocab_size,
        "data pack: the tokenizer's end token {} is not in its vocabulary of {}", t.eos_id, t.vocab_size);
}

// A directory of the user's own, perhaps the input itself, must not be lost to a slip.
bool may_be_replaced(const fs::path& directory) {
  std::error_code error;
  return !fs::exists(directory, error) || fs::exists(directory / "manifest.json", error) ||
         (fs::is_directory(directory, error) && fs::is_empty(directory, error));
}

}  // namespace

PackSummary pack_corpus(const PackOptions& options) {
  check_options(options);
  check(!options.replace || may_be_replaced(options.out),
        "{}: only packed data (with a manifest.json) is replaced, and this is something else",
        options.out.string());
  const std::vector<fs::path> files = list_inputs(options.inputs);
  uint64_t total = 0;
  for (const auto& file : files) {
    std::error_code error;
    const uint64_t size = fs::is_regular_file(file, error) ? fs::file_size(file, error) : 0;
    total += error ? 0 : size;
  }
  using Existing = io::AtomicDirectory::Existing;
  io::AtomicDirectory out(options.out, options.replace ? Existing::kReplace : Existing::kRefuse);
  PackSummary summary;
  const Rule rule = choose_rule(options, files);
  summary.rule = rule.kind;
  Packer packer(options, out.temporary(), rule);
  uint64_t before = 0, documents = 0;
  for (const auto& file : files) {
    uint64_t in_file = 0;
    read_documents(file, [&](const Document& document, uint64_t consumed) {
      in_file = consumed;
      if (document.text.empty()) {
        ++summary.empty_documents;
        return;
      }
      ++documents;
      packer.add(document);
      if (options.progress) options.progress(before + consumed, total);
    });
    before += in_file;
  }
  check(documents > 0, "data pack: no text in the {} input files (the first is {})", files.size(),
        files.empty() ? options.inputs[0].string() : files[0].string());
  packer.finish(summary);
  if (summary.rule != PackSummary::Holdout::kNone) {
    check(summary.heldout.documents > 0 && summary.train.documents > 0,
          "data pack: holding out {} of this text leaves {} documents to train on and {} held out",
          options.holdout, summary.train.documents, summary.heldout.documents);
    write_split_manifest(out.temporary(), options, summary);
  }
  out.commit();
  return summary;
}

}  // namespace godwit::data
