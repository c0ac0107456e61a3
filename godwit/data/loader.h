// Training sequences out of token shards. Sample n of a stage is a pure function of (data, seed, stage,
// sequence length, n): a run that resumes, or resumes on another number of ranks, needs only its step.
//
// Each data set is an endless stream: its documents in an order shuffled anew each epoch, one after another.
// Sequence k of the stream is its tokens k L .. (k + 1) L, so every token comes exactly once an epoch and
// nothing is padded. A document that a sequence end cuts goes on in the next sequence as a document of its
// own.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "godwit/data/ahead.h"
#include "godwit/data/dataset.h"
#include "godwit/data/mixture.h"
#include "godwit/data/packed_batch.h"

namespace godwit::data {

enum class Packing {
  kConcatenate,  // as above
  // A document of L tokens or more gives whole sequences from its beginning, each L tokens of that document
  // alone; what is left of it joins the shorter documents. For stages whose point is long context.
  kWholeWindows,
};

// Where an earlier stage stopped in a data set.
struct Continuation {
  uint64_t stage = 0;  // whose order goes on
  uint64_t token = 0;  // how much of that stream is used up
};

struct MixEntry {
  std::shared_ptr<const TokenDataset> dataset;
  double weight = 1;                 // share of the tokens, relative to the other entries
  uint64_t min_document_tokens = 0;  // shorter documents are left out
  // kConcatenate only. None: an order of this stage's own, from its start.
  std::optional<Continuation> continues = {};
};

struct LoaderOptions {
  uint64_t seed = 0;
  uint64_t stage = 0;
  int64_t sequence_length = 0;  // L
  int64_t batch_sequences = 0;  // of all ranks together
  Packing packing = Packing::kConcatenate;
  std::vector<MixEntry> mix = {};
};

// Tokens of a batch to sequences of it. A batch that is no whole number of sequences is an Error.
int64_t sequences_in_batch(int64_t batch_tokens, int64_t sequence_length);

class TokenStream;

// Safe to use from several threads.
class PackedLoader {
 public:
  explicit PackedLoader(LoaderOptions options);
  ~PackedLoader();

  // The part of `rank` of `world` in the batch of `step` (from 0 in this stage). `world` divides the batch;
  // the parts of all ranks in order are the batch of one rank.
  PackedBatch batch(int64_t step, int64_t rank = 0, int64_t world = 1) const;
  // Sequence n alone; batch b holds the sequences b * batch_sequences and on.
  PackedBatch sequence(uint64_t n) const;
  // Makes the sequences first .. first + count in the background, for sequence() to take. Decoding pictures
  // would keep a device waiting; without pictures this does nothing.
  void prepare(uint64_t first, uint64_t count) const;

  // Where a later stage goes on in the data of `entry` after `steps` steps of this one. kConcatenate only.
  Continuation continuation(size_t entry, int64_t steps) const;
  // Times through the data of `entry` in `steps` steps.
  double epochs(size_t entry, int64_t steps) const;

  const LoaderOptions& options() const { return options_; }

 private:
  void append_sequence(uint64_t n, PackedBatch& batch) const;
  PackedBatch made(uint64_t n) const;

  struct Source {
    size_t entry;
    std::unique_ptr<const TokenStream> stream;
    uint64_t first_token;
  };
  LoaderOptions options_;
  std::vector<Source> sources_;
  std::optional<Mixture> mixture_;
  bool media_ = false;  // some data set has pictures
  mutable std::mutex ahead_mutex_;
  mutable SequencesAhead ahead_;  // the last member: its threads use the others
};

}  // namespace godwit::data
