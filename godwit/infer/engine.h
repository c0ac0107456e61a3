// Many requests on one model: continuous batching. Every step feeds one token of each running sequence and
// pieces of the prompts that are being read, in one forward call.
//
// What a request draws does not depend on what runs beside it: not on the batch, the order of arrival, the
// pieces its prompt was read in, nor on whether its prefix was in the cache. Bit for bit in fp32 on the CPU,
// where no row of any op depends on another; on a GPU with EngineOptions::deterministic, which gives every
// row the same shapes of calls whatever else there is.
//
// Threads: submit, abort and stats may be called from any thread; step, and with it every callback, runs on
// one thread of the caller's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "godwit/infer/decode_graph.h"
#include "godwit/infer/model.h"
#include "godwit/infer/prefix_cache.h"
#include "godwit/infer/prompt_media.h"
#include "godwit/infer/sampler.h"

namespace godwit {

enum class FinishReason { kStop, kLength, kCancelled, kError, kNoRoom };
inline bool failed(FinishReason reason) {
  return reason == FinishReason::kError || reason == FinishReason::kNoRoom;
}

struct Finish {
  FinishReason reason = FinishReason::kStop;
  std::string error = {};  // where it failed; kNoRoom: there was no place for it, or no time any more
  int32_t stop_id = -1;    // kStop: the id that was drawn
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, taken from the prefix cache
  int64_t drawn_tokens = 0;
  std::shared_ptr<const SwappedState> state = {};  // where the request kept it, and anything was read
};

// Narrows what may be drawn next (a grammar, say). One object a choice.
class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;
  // Sets `forbidden` [V] bool to true where a token may not come next.
  virtual void forbid(at::Tensor& forbidden) = 0;
  virtual void accept(int32_t id) = 0;
};

// Requests that one client waits for. None of them is sent away for waiting once one has had its place.
struct RequestGroup {
  std::function<void()> on_place = {};  // when the first of them gets one; on the step's thread
  std::atomic<bool> placed = false;
};

struct Request {
  std::vector<int32_t> prompt;
  MediaList media = {};  // its pictures, in order (prompt_media.h)
  SamplingParams sampling = {};
  int64_t max_tokens = 128;
  int64_t min_tokens = 0;                      // before so many are drawn no stop id is
  std::vector<int32_t> stop_ids = {};          // drawing one ends the text; it is not part of it
  std::vector<int32_t> allowed_specials = {};  // special tokens that may be drawn besides the stop ids
  int64_t top_logprobs = 0;
  int64_t choices =
      1;  // continuations of the one prompt; choice c draws with the seed of choice_seed(seed, c)
  std::function<std::unique_ptr<TokenConstraint>()> constraint = {};
  // Teacher forcing: the token that choice `choice` takes as its n-th, whatever is likely.
  std::function<int32_t(int64_t choice, int64_t n)> forced = {};
  // A pause. Asked when a choice ends, cancelled ones too: true hands over what it has read, in
  // Finish::state. A request with all of its tokens as the prompt, the same seed and that state as `state`
  // goes on bit for bit as if nothing had happened, in another engine too, while the weights are the same.
  std::function<bool(int64_t choice)> keep_state = {};
  std::shared_ptr<const SwappedState> state = {};  // with one choice only
  // Each token as it is drawn; returning false ends that choice (kCancelled).
  std::function<bool(int64_t choice, const DrawnToken& token)> on_token = {};
  std::function<void(int64_t choice, const Finish& finish)> on_finish = {};
  std::shared_ptr<RequestGroup> group = {};  // none: it is alone
};

// The seed of one choice of a request: choice 0 draws with the request's own.
uint64_t choice_seed(uint64_t seed, int64_t choice);

struct EngineOptions {
  int64_t max_sequences = 16;  // that run together
  int64_t max_context = 0;     // tokens of one sequence; 0: the configuration's
  int64_t cache_tokens =
      0;  // of all sequences and cached prefixes; 0: max_sequences * min(max_context, 8192)
  // Of prompts, fed in one step; rounded up to whole pages. 0: default_prefill_tokens (memory.h), or less
  // where memory is short.
  int64_t prefill_tokens = 0;
  // Tokens drafted by prompt lookup and verified in one step; 0: none. What is drawn does not change (on a
  // GPU up to the roundings of products of other sizes).
  int64_t draft_tokens = 0;
  bool fp8_latents = false;  // the cache of latents in 8 bits: half of bf16's memory, other answers
  PrefixCache::Options prefix = {};
  bool graphs = true;  // on a GPU decode steps are recorded and started as one launch
  // Refused where it cannot be kept. On a GPU every step has as many rows as max_sequences, and each prompt
  // is read alone, in pieces that end at multiples of kDeterministicPiece.
  bool deterministic = false;
  double max_wait_s =
      0;  // a request (or group) that waits longer for its place ends with kNoRoom; 0: none does
  // What the engine may take of the device's memory; 0: whatever it asks for (see memory.h).
  int64_t memory_bytes = 0;
};

inline constexpr int64_t kDeterministicPiece = 1024;

struct EngineStats {
  int64_t waiting = 0, running = 0;  // sequences
  int64_t finished = 0, failed = 0, preempted = 0;
  int64_t prompt_tokens = 0;  // of admitted requests; of them `cached_tokens` came from the prefix cache
  int64_t cached_tokens = 0, drawn_tokens = 0;
  // Of the prompts' tokens those that an earlier prompt began with, in whole pages, whether a state lay there
  // or not; prompts that went on from a state, and of them from one in host memory.
  int64_t known_tokens = 0, prefix_hits = 0, host_hits = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;  // of speculation; accepted ones are among drawn_tokens
  int64_t free_pages = 0, pages = 0;
  int64_t prefix_entries = 0, prefix_bytes = 0, state_bytes = 0;
  int64_t host_entries = 0, host_bytes = 0;  // of the prefix entries those in host memory
  int64_t steps = 0;
};

class Engine {
 public:
  // Throws Error when the memory for `options` is not there.
  Engine(const LoadedModel& model, const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a request. Throws Error, naming the limit, when it can never run: no prompt, ids outside the
  // vocabulary, placeholders that are not as many as the pictures need, a prompt that leaves no room in
  // max_context or in the cache.
  int64_t submit(Request request);
  // Ends a request within one step, all of its choices; unknown ids are ignored.
  void abort(int64_t request);
  // Ends everything, running, waiting or just submitted, with kNoRoom and `reason`. On the step's thread.
  void end_all(const std::string& reason);

  // Admits, feeds, draws. False when there was nothing to do.
  bool step();
  void run_until_idle();

  // The weights have changed: what cached prefixes hold is no longer theirs. Nothing may be running.
  void forget_prefixes();

  EngineStats stats() const;
  int64_t max_context() const { return max_context_; }

 private:
  struct Sequence;
  struct Piece;
  struct Drawing;
  struct Outcome;

  void take_inbox();
  void end_long_waits();
  void admit();
  bool place_sequence(Sequence& sequence);
  bool restore_prefix(int64_t slot, std::span<const int64_t> prompt);
  std::vector<Piece> plan_step();
  int64_t piece_end(const Sequence& sequence, int64_t from, int64_t left) const;
  std::vector<std::vector<Piece>> calls_of(std::vector<Piece> pieces) const;
  bool make_room(Sequence& sequence, int64_t tokens);
  bool preempt_youngest(const Sequence& keep);
  void feed(const std::vector<Piece>& pieces);
  void add_drafts(Piece& piece, bool recorded);
  bool takes_graph(const std::vector<Piece>& pieces) const;
  void graph_step(const std::vector<Piece>& pieces);
  at::Tensor on_host(const at::Tensor& logits);
  void draw(std::vector<Drawing>& drawings, const at::Tensor& logits);
  Outcome draw_here(Sequence& sequence, const at::Tensor& row) const;
  void draw_rows(const std::vector<Drawing*>& drawings, const at::Tensor& logits);
  void draw_there(const std::vector<Drawing*>& drawings, const at::Tensor& logits);
  void take_outcome(Drawing& drawing, Outcome outcome);
  void take_back(const Drawing& drawing);
  void keep_drawn(const std::vector<Drawing>& drawings);
  void take_token(Sequence& sequence, DrawnToken token);
  void finish(Sequence& sequence, Finish finish);
  void drop_finished();
  void publish();

  const LoadedModel& model_;
  EngineOptions options_;
  bool fixed_shapes_ = false;  // deterministic, on a GPU
  int64_t max_context_ = 0;
  ModelState state_;
  PrefixCache prefix_;
  std::unique_ptr<DecodeGraphs> graphs_;  // where the device has them
  at::Tensor host_logits_;                // pinned, with a GPU
  std::vector<int64_t> free_slots_;
  std::deque<std::unique_ptr<Sequence>> waiting_;
  std::vector<std::unique_ptr<Sequence>> running_;  // in the order of admission

  mutable std::mutex mutex_;  // of the inbox and the published figures
  std::vector<std::unique_ptr<Sequence>> inbox_;
  std::unordered_set<int64_t> aborted_;
  int64_t next_request_ = 1;
  EngineStats stats_;      // the step's thread's own
  EngineStats published_;  // what stats() gives
};

}  // namespace godwit
