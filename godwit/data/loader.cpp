#include "godwit/data/loader.h"

#include <algorithm>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/base/rng.h"
#include "godwit/data/token_stream.h"

namespace godwit::data {
namespace {

// Streams of randomness that must not meet.
enum Purpose : uint64_t { kOrder = 1, kWindowOrder = 2, kChoice = 3 };

uint64_t order_key(uint64_t seed, uint64_t stage, Purpose purpose, const MixEntry& entry) {
  return random_bits(random_bits(seed, purpose, stage), entry.dataset->fingerprint(),
                     entry.min_document_tokens);
}

void check_mix(const LoaderOptions& options) {
  check(options.sequence_length > 0, "a data loader with sequences of {} tokens", options.sequence_length);
  check(options.batch_sequences > 0, "a data loader with batches of {} sequences", options.batch_sequences);
  check(!options.mix.empty(), "a data loader without data");
  const TokenDataset& first = *options.mix[0].dataset;
  for (const auto& entry : options.mix) {
    const TokenDataset& other = *entry.dataset;
    check(other.manifest().tokenizer_hash == first.manifest().tokenizer_hash &&
              other.manifest().vocab_size == first.manifest().vocab_size,
          "{} and {} were packed with different tokenizers", first.path().string(), other.path().string());
    check(!entry.continues || options.packing == Packing::kConcatenate,
          "{}: only concatenated data can continue an earlier stage", other.path().string());
  }
}

struct Cut {
  std::vector<Segment> windows, rest;
  uint64_t window_tokens = 0, rest_tokens = 0;
};

// What the entry's documents give: whole windows of `length` tokens (none if 0), and everything else.
Cut cut_documents(const MixEntry& entry, uint64_t length) {
  Cut cut;
  for (uint64_t d = 0; d < entry.dataset->documents(); ++d) {
    const uint64_t tokens = entry.dataset->document_tokens(d);
    if (tokens == 0 || tokens < entry.min_document_tokens) continue;
    uint64_t begin = 0;
    for (; length > 0 && begin + length <= tokens; begin += length) cut.windows.push_back({d, begin, length});
    if (begin < tokens) cut.rest.push_back({d, begin, tokens - begin});
    cut.window_tokens += begin;
    cut.rest_tokens += tokens - begin;
  }
  check(cut.window_tokens + cut.rest_tokens > 0, "{}: no document of {} tokens or more",
        entry.dataset->path().string(), entry.min_document_tokens);
  return cut;
}

}  // namespace

int64_t sequences_in_batch(int64_t batch_tokens, int64_t sequence_length) {
  check(sequence_length > 0 && batch_tokens > 0 && batch_tokens % sequence_length == 0,
        "a batch of {} tokens is no whole number of sequences of {}", batch_tokens, sequence_length);
  return batch_tokens / sequence_length;
}

PackedLoader::PackedLoader(LoaderOptions options) : options_(std::move(options)) {
  check_mix(options_);
  std::vector<double> weights;
  for (size_t e = 0; e < options_.mix.size(); ++e) {
    const MixEntry& entry = options_.mix[e];
    media_ |= entry.dataset->has_media();
    const Continuation start = entry.continues.value_or(Continuation{options_.stage, 0});
    const uint64_t key = order_key(options_.seed, start.stage, kOrder, entry);
    if (options_.packing == Packing::kConcatenate && entry.min_document_tokens == 0) {
      sources_.push_back({e, std::make_unique<TokenStream>(entry.dataset, key), start.token});
      weights.push_back(entry.weight);
      continue;
    }
    const bool windows = options_.packing == Packing::kWholeWindows;
    Cut cut = cut_documents(entry, windows ? static_cast<uint64_t>(options_.sequence_length) : 0);
    const double unit = entry.weight / static_cast<double>(cut.window_tokens + cut.rest_tokens);
    if (cut.window_tokens > 0) {
      const uint64_t window_key = order_key(options_.seed, start.stage, kWindowOrder, entry);
      sources_.push_back(
          {e, std::make_unique<TokenStream>(entry.dataset, std::move(cut.windows), window_key), 0});
      weights.push_back(unit * static_cast<double>(cut.window_tokens));
    }
    if (cut.rest_tokens > 0) {
      sources_.push_back(
          {e, std::make_unique<TokenStream>(entry.dataset, std::move(cut.rest), key), start.token});
      weights.push_back(unit * static_cast<double>(cut.rest_tokens));
    }
  }
  mixture_.emplace(weights, random_bits(options_.seed, kChoice, options_.stage));
}

PackedLoader::~PackedLoader() = default;

void PackedLoader::append_sequence(uint64_t n, PackedBatch& batch) const {
  const Mixture::Choice choice = mixture_->at(n);
  const Source& source = sources_[choice.stream];
  const auto length = static_cast<uint64_t>(options_.sequence_length);
  source.stream->read(source.first_token + choice.index * length, length, [&](const Segment& segment) {
    batch.append(source.stream->dataset(), static_cast<int64_t>(source.entry), segment);
  });
}

PackedBatch PackedLoader::made(uint64_t n) const {
  PackedBatch batch;
  append_sequence(n, batch);
  return batch;
}

PackedBatch PackedLoader::sequence(uint64_t n) const {
  if (media_) {
    const std::scoped_lock lock(ahead_mutex_);
    if (std::optional<PackedBatch> ready = ahead_.take(n)) return std::move(*ready);
  }
  return made(n);
}

void PackedLoader::prepare(uint64_t first, uint64_t count) const {
  if (!media_ || count == 0) return;
  constexpr int kMostThreads = 16;
  const std::scoped_lock lock(ahead_mutex_);
  ahead_.start(first, count, std::clamp(num_threads() / 2, 1, kMostThreads),
               [this](uint64_t n) { return made(n); });
}

PackedBatch PackedLoader::batch(int64_t step, int64_t rank, int64_t world) const {
  check(step >= 0, "batch of step {}", step);
  check(world > 0 && rank >= 0 && rank < world && options_.batch_sequences % world == 0,
        "a batch of {} sequences cannot be shared by {} ranks (rank {})", options_.batch_sequences, world,
        rank);
  const int64_t share = options_.batch_sequences / world;
  PackedBatch batch;
  batch.ids.reserve(static_cast<size_t>(share * options_.sequence_length + 1));
  batch.targets.reserve(static_cast<size_t>(share * options_.sequence_length));
  const int64_t first = step * options_.batch_sequences + rank * share;
  for (int64_t n = first; n < first + share; ++n) append_sequence(static_cast<uint64_t>(n), batch);
  return batch;
}

Continuation PackedLoader::continuation(size_t entry, int64_t steps) const {
  check(options_.packing == Packing::kConcatenate,
        "only concatenated data can be continued by a later stage");
  check(entry < sources_.size() && steps >= 0, "entry {} of {} in the mix, step {}", entry, sources_.size(),
        steps);
  const uint64_t sequences = mixture_->count(entry, static_cast<uint64_t>(steps * options_.batch_sequences));
  const uint64_t stage =
      options_.mix[entry].continues ? options_.mix[entry].continues->stage : options_.stage;
  return {stage, sources_[entry].first_token + sequences * static_cast<uint64_t>(options_.sequence_length)};
}

double PackedLoader::epochs(size_t entry, int64_t steps) const {
  double read = 0, whole = 0;
  for (size_t s = 0; s < sources_.size(); ++s) {
    if (sources_[s].entry != entry) continue;
    const uint64_t sequences = mixture_->count(s, static_cast<uint64_t>(steps * options_.batch_sequences));
    read += static_cast<double>(sequences) * static_cast<double>(options_.sequence_length);
    whole += static_cast<double>(sources_[s].stream->tokens_per_epoch());
  }
  return whole > 0 ? read / whole : 0;
}

}  // namespace godwit::data
