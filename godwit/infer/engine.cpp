#include "godwit/infer/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"
#include "godwit/infer/engine_sequence.h"
#include "godwit/infer/memory.h"
#include "godwit/model/forward.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

constexpr uint64_t kChoiceStream = 0x63686f696365;  // "choice"

bool uses_graphs(const LoadedModel& model, const EngineOptions& options) {
  return options.graphs &&
         DecodeGraphs::supports(model.config, model.device, model.weights.embed.scalar_type());
}

// Whether answers that do not depend on the batch need steps of fixed shapes. Error where they cannot be had.
bool needs_fixed_shapes(const LoadedModel& model, const EngineOptions& options) {
  if (!options.deterministic) return false;
  if (model.device.is_cpu()) {
    check(model.weights.embed.scalar_type() == at::kFloat,
          "engine: deterministic answers on the CPU need fp32 (--dtype f32)");
    return false;
  }
  check(uses_graphs(model, options),
        "engine: deterministic answers on a GPU need recorded steps: bf16, KDA heads of 128, latents of "
        "256 or 512 and 64 positional values");
  return true;
}

// Prefixes end where pieces of prompts do, and do not cut them.
PrefixCache::Options prefix_options(const EngineOptions& options, bool fixed_shapes) {
  PrefixCache::Options prefix = options.prefix;
  prefix.interval = std::max(prefix.interval, options.prefill_tokens);
  if (fixed_shapes) prefix.granule = kDeterministicPiece;
  return prefix;
}

}  // namespace

uint64_t choice_seed(uint64_t seed, int64_t choice) {
  return choice == 0 ? seed : random_bits(seed, kChoiceStream, static_cast<uint64_t>(choice));
}

Engine::Engine(const LoadedModel& model, const EngineOptions& options)
    : model_(model),
      options_(fit_options(model.config, options, model.weights.embed.scalar_type(), model.device)),
      fixed_shapes_(needs_fixed_shapes(model, options)),
      max_context_(std::min(options_.max_context, options_.cache_tokens)),
      state_(model.config,
             {.sequences = options_.max_sequences + (uses_graphs(model, options_) ? 1 : 0),
              .pages = options_.cache_tokens / kLatentPage + (uses_graphs(model, options_) ? 1 : 0),
              .fp8_latents = options_.fp8_latents},
             model.device, model.weights.embed.scalar_type()),
      prefix_(prefix_options(options_, fixed_shapes_), state_) {
  for (int64_t slot = options_.max_sequences; slot-- > 0;) free_slots_.push_back(slot);
  if (uses_graphs(model, options_))
    graphs_ = std::make_unique<DecodeGraphs>(
        model.config, model.weights, state_,
        DecodeGraphs::Options{.max_context = max_context_,
                              .least_sequences = fixed_shapes_ ? options_.max_sequences : 1,
                              .most_tokens = 1 + options_.draft_tokens});
  publish();
}

Engine::~Engine() = default;

int64_t Engine::submit(Request request) {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  check(prompt > 0, "the prompt has no token");
  check(prompt < max_context_, "the prompt has {} tokens; this server's context holds {} with the answer",
        prompt, max_context_);
  check(request.max_tokens > 0, "max_tokens must be positive, got {}", request.max_tokens);
  check(request.choices > 0 && request.choices <= 128, "choices must be 1 to 128, got {}", request.choices);
  for (const int32_t id : request.prompt) {
    check(id >= 0 && id < model_.config.vocab_size, "token id {} lies outside the vocabulary of {}", id,
          model_.config.vocab_size);
  }
  for (const auto& [id, bias] : request.sampling.logit_bias) {
    check(id >= 0 && id < model_.config.vocab_size, "logit_bias: id {} lies outside the vocabulary of {}", id,
          model_.config.vocab_size);
  }
  if (request.state) {
    check(request.choices == 1 && request.state->length > 0 && request.state->length < prompt,
          "a state after {} tokens cannot be gone on from with a prompt of {} tokens and {} choices",
          request.state->length, prompt, request.choices);
    check(request.state->kda.size() == state_.layers().size(), "a state of {} layers is not this model's",
          request.state->kda.size());
  }
  std::vector<int32_t> allowed = request.stop_ids;
  allowed.insert(allowed.end(), request.allowed_specials.begin(), request.allowed_specials.end());
  const at::Tensor forbidden = forbidden_tokens(model_, allowed);
  const at::Tensor early =
      request.min_tokens > 0 ? forbidden_tokens(model_, request.allowed_specials) : at::Tensor();
  if (early.defined()) {
    for (const int32_t id : request.stop_ids) early[id] = true;
  }
  const auto media = std::make_shared<PromptMedia>(model_, request.prompt, std::move(request.media));
  const auto shared = std::make_shared<const Request>(std::move(request));
  const SamplingParams& sampling = shared->sampling;
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (int64_t choice = 0; choice < shared->choices; ++choice) {
    auto& sequence = sequences.emplace_back(std::make_unique<Sequence>());
    sequence->request = shared;
    sequence->choice = choice;
    sequence->sampling = sampling;
    sequence->sampling.seed = choice_seed(sampling.seed, choice);
    sequence->media = media;
    sequence->forbidden = forbidden;
    sequence->forbidden_early = early;
    if (shared->state) {
      sequence->swapped = *shared->state;  // shares its tensors
      sequence->cached = shared->state->length;
    }
    sequence->uses_history = sampling.presence_penalty != 0 || sampling.frequency_penalty != 0 ||
                             sampling.repetition_penalty != 1.0;
    if (shared->constraint) sequence->constraint = shared->constraint();
  }

  const std::lock_guard lock(mutex_);
  const int64_t id = next_request_++;
  for (auto& sequence : sequences) {
    sequence->id = id;
    inbox_.push_back(std::move(sequence));
    ++published_.waiting;
  }
  return id;
}

void Engine::abort(int64_t request) {
  const std::lock_guard lock(mutex_);
  aborted_.insert(request);
}

// New requests join the queue; aborted ones end.
void Engine::take_inbox() {
  std::unordered_set<int64_t> aborted;
  {
    const std::lock_guard lock(mutex_);
    for (auto& sequence : inbox_) waiting_.push_back(std::move(sequence));
    inbox_.clear();
    aborted.swap(aborted_);
  }
  if (aborted.empty()) return;
  const auto end = [&](auto& sequences) {
    for (auto& sequence : sequences) {
      if (aborted.contains(sequence->id)) finish(*sequence, {.reason = FinishReason::kCancelled});
    }
  };
  end(waiting_);
  end(running_);
  drop_finished();
}

// Requests that nobody will answer in time make way. Those that ran already come first in the queue and stay.
void Engine::end_long_waits() {
  if (options_.max_wait_s <= 0) return;
  const auto now = std::chrono::steady_clock::now();
  for (auto& s : waiting_) {
    const double waited = std::chrono::duration<double>(now - s->submitted).count();
    const bool placed = s->request->group && s->request->group->placed;
    if (placed || s->drawn() > 0 || s->swapped || waited <= options_.max_wait_s) continue;
    finish(*s,
           {.reason = FinishReason::kNoRoom,
            .error = fmt::format("no place in the cache came free in {:.3g} s; try again later", waited)});
  }
  std::erase_if(waiting_, [](const auto& s) { return s->finished; });
}

// The longest cached state that the prompt begins with. One from host memory joins the store again.
bool Engine::restore_prefix(int64_t slot, std::span<const int64_t> prompt) {
  std::optional<PrefixCache::Hit> hit = prefix_.find(prompt);
  if (!hit) return false;
  if (hit->stored) {
    state_.restore(slot, *hit->stored);
    ++stats_.prefix_hits;
    return true;
  }
  while (!state_.swap_in(slot, hit->host)) {
    if (!prefix_.evict()) return false;
  }
  prefix_.insert(prompt.first(hit->length), state_.snapshot(slot));
  ++stats_.prefix_hits;
  ++stats_.host_hits;
  return true;
}

// A slot, and the state to go on from.
bool Engine::place_sequence(Sequence& sequence) {
  const int64_t slot = free_slots_.back();
  if (sequence.tokens.empty()) {
    sequence.tokens = sequence.request->prompt;
    if (sequence.uses_history) sequence.history.prompt.insert(sequence.tokens.begin(), sequence.tokens.end());
  }
  if (sequence.swapped) {
    while (!state_.swap_in(slot, *sequence.swapped)) {
      if (!prefix_.evict()) return false;
    }
    sequence.swapped.reset();
  } else {
    const std::span<const int64_t> prompt = sequence.media->keys();
    if (!restore_prefix(slot, prompt)) state_.clear(slot);
    while (!state_.reserve(slot, sequence.prompt_size() + 1 - state_.length(slot))) {
      if (!prefix_.evict()) {
        state_.clear(slot);
        return false;
      }
    }
    sequence.cached = state_.length(slot);
    stats_.known_tokens += prefix_.known_tokens(prompt);
    sequence.boundaries = prefix_.boundaries(prompt, sequence.cached);
    stats_.prompt_tokens += sequence.prompt_size();
    stats_.cached_tokens += sequence.cached;
  }
  sequence.slot = slot;
  free_slots_.pop_back();
  return true;
}

// First come, first served. The choices of one prompt wait until the first of them has read it.
void Engine::admit() {
  const auto reading = [&](int64_t id) {
    return std::any_of(running_.begin(), running_.end(), [&](const auto& s) {
      return s->id == id && state_.length(s->slot) < s->prompt_size();
    });
  };
  while (!waiting_.empty() && !free_slots_.empty()) {
    Sequence& next = *waiting_.front();
    if (reading(next.id) || !place_sequence(next)) return;
    RequestGroup* group = next.request->group.get();
    if (group && !group->placed.exchange(true) && group->on_place) group->on_place();
    running_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

// The youngest running sequence but `keep` leaves the store and waits at the head of the queue.
bool Engine::preempt_youngest(const Sequence& keep) {
  for (size_t i = running_.size(); i-- > 0;) {
    Sequence& victim = *running_[i];
    if (&victim == &keep || victim.finished) continue;
    victim.swapped = state_.swap_out(victim.slot);
    free_slots_.push_back(victim.slot);
    victim.slot = -1;
    waiting_.push_front(std::move(running_[i]));
    running_.erase(running_.begin() + static_cast<int64_t>(i));
    ++stats_.preempted;
    return true;
  }
  return false;
}

bool Engine::make_room(Sequence& sequence, int64_t tokens) {
  while (!state_.reserve(sequence.slot, tokens)) {
    if (!prefix_.evict() && !preempt_youngest(sequence)) return false;
  }
  return true;
}

// Where the next piece of a prompt ends, of which `left` tokens may be fed: at the prompt's end, at a
// boundary of the cache, or at a page's end.
int64_t Engine::piece_end(const Sequence& s, int64_t from, int64_t left) const {
  const int64_t size = s.size();
  if (fixed_shapes_) return std::min(size, (from / kDeterministicPiece + 1) * kDeterministicPiece);
  int64_t to = size;
  for (const int64_t boundary : s.boundaries) {
    if (boundary > from && boundary < size) {
      to = boundary;
      break;
    }
  }
  return to - from > left ? from + left - (from + left) % kLatentPage : to;
}

// One token of every sequence that draws, then pieces of prompts, oldest first, up to prefill_tokens.
std::vector<Engine::Piece> Engine::plan_step() {
  std::vector<Sequence*> sequences;
  for (const auto& s : running_) sequences.push_back(s.get());
  std::vector<Piece> pieces;
  int64_t left = options_.prefill_tokens;
  for (Sequence* s : sequences) {
    if (s->slot < 0 || s->finished) continue;  // preempted for an older one of this loop
    const int64_t from = state_.length(s->slot);
    int64_t to = s->size();
    if (to - from > 1) {
      if (left <= 0) continue;
      to = piece_end(*s, from, left);
      if (to <= from) continue;
      left -= to - from;
    }
    if (!make_room(*s, to - from)) {
      finish(*s, {.reason = FinishReason::kNoRoom,
                  .error = "the cache has no room for another token of this sequence"});
      continue;
    }
    pieces.push_back({.sequence = s, .from = from, .to = to});
  }
  std::erase_if(pieces, [](const Piece& p) { return p.sequence->slot < 0; });
  std::stable_partition(pieces.begin(), pieces.end(), [](const Piece& p) { return p.steps(); });
  if (options_.draft_tokens > 0) {
    const bool recorded = graphs_ && (fixed_shapes_ || takes_graph(pieces));
    for (Piece& piece : pieces) add_drafts(piece, recorded);
  }
  return pieces;
}

// The pieces by forward call. With fixed shapes those that a recorded step takes go together, padded to one
// size, and every other has a call of its own.
std::vector<std::vector<Engine::Piece>> Engine::calls_of(std::vector<Piece> pieces) const {
  std::vector<std::vector<Piece>> calls;
  if (!fixed_shapes_) {
    calls.push_back(std::move(pieces));
    return calls;
  }
  std::vector<Piece> drawing;
  for (Piece& piece : pieces) {
    if (piece.draws())
      drawing.push_back(std::move(piece));
    else
      calls.push_back({std::move(piece)});
  }
  if (!drawing.empty()) calls.push_back(std::move(drawing));
  return calls;
}

// Drafts go where room is free: nothing is evicted for them. A recorded step needs no copy to go back to. In
// other steps the state stands behind the drafts when a sequence ends, which must not be what it hands over.
void Engine::add_drafts(Piece& piece, bool recorded) {
  Sequence& s = *piece.sequence;
  if (!piece.draws() || (!recorded && s.request->keep_state)) return;
  const int64_t left = std::min(s.request->max_tokens - s.drawn(), max_context_ - s.size()) - 1;
  std::vector<int32_t> drafts = s.lookup.draft(s.tokens, std::min(options_.draft_tokens, left));
  // A picture's place has no token of its own to be verified.
  drafts.erase(std::find(drafts.begin(), drafts.end(), model_.config.media_id), drafts.end());
  if (drafts.empty() || !state_.reserve(s.slot, 1 + static_cast<int64_t>(drafts.size()))) return;
  piece.drafts = std::move(drafts);
  if (!recorded) piece.before = state_.copy_kda(s.slot);
  stats_.drafted_tokens += static_cast<int64_t>(piece.drafts.size());
}

// Whether all pieces are the last tokens of sequences that draw.
bool Engine::takes_graph(const std::vector<Piece>& pieces) const {
  return graphs_ && std::all_of(pieces.begin(), pieces.end(), [](const Piece& p) { return p.draws(); });
}

// By a recorded step; where any has drafts, and always with fixed shapes, by one that has room for them.
void Engine::graph_step(const std::vector<Piece>& pieces) {
  const bool verify = options_.draft_tokens > 0 &&
                      (fixed_shapes_ || std::any_of(pieces.begin(), pieces.end(),
                                                    [](const auto& p) { return !p.drafts.empty(); }));
  std::vector<std::vector<int64_t>> ids;
  std::vector<int64_t> last, slots;
  std::vector<Drawing> drawing;
  for (const Piece& piece : pieces) {
    const Sequence& s = *piece.sequence;
    last.push_back(s.tokens[piece.from]);
    ids.push_back({last.back()});
    ids.back().insert(ids.back().end(), piece.drafts.begin(), piece.drafts.end());
    slots.push_back(s.slot);
    const auto n = static_cast<int64_t>(drawing.size());
    drawing.push_back({.piece = &piece, .row = verify ? n * (1 + options_.draft_tokens) : n});
  }
  if (!verify) return draw(drawing, graphs_->step(last, slots));
  draw(drawing, graphs_->verify(ids, slots));
  keep_drawn(drawing);
}

void Engine::feed(const std::vector<Piece>& pieces) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> ids, lengths, slots, logit_rows;
  std::vector<Drawing> drawing;
  int64_t step_sequences = 0;
  bool drafts = false;
  for (const Piece& piece : pieces) {
    const auto& tokens = piece.sequence->tokens;
    const auto first = static_cast<int64_t>(ids.size());
    ids.insert(ids.end(), tokens.begin() + piece.from, tokens.begin() + piece.to);
    ids.insert(ids.end(), piece.drafts.begin(), piece.drafts.end());
    lengths.push_back(piece.tokens());
    slots.push_back(piece.sequence->slot);
    step_sequences += piece.steps() ? 1 : 0;
    drafts = drafts || !piece.drafts.empty();
    if (piece.to != piece.sequence->size()) continue;
    drawing.push_back({.piece = &piece, .call_row = first, .row = static_cast<int64_t>(logit_rows.size())});
    for (int64_t row = first + piece.to - piece.from - 1; row < static_cast<int64_t>(ids.size()); ++row)
      logit_rows.push_back(row);
  }
  at::Tensor logits;
  try {
    if (takes_graph(pieces)) return graph_step(pieces);
    std::vector<at::Tensor> media;
    for (const Piece& piece : pieces) {
      const at::Tensor part = piece.sequence->media->vectors(piece.from, piece.to);
      if (part.defined()) media.push_back(part);
    }
    const PackedBatch batch{.ids = at::tensor(ids, at::kLong).to(model_.device),
                            .cu_seqlens = make_cu_seqlens(lengths),
                            .sequences = slots,
                            .step_sequences = step_sequences,
                            .record = drafts,
                            .media = media.empty() ? at::Tensor() : at::cat(media)};
    const at::Tensor hidden = forward_hidden(model_.config, model_.weights, batch, &state_);
    if (!drawing.empty()) {
      const bool all = logit_rows.size() == ids.size();
      const at::Tensor rows =
          all ? hidden : hidden.index_select(0, at::tensor(logit_rows, at::kLong).to(model_.device));
      logits = ops::linear(rows, head_weight(model_.config, model_.weights)).to(at::kFloat);
    }
  } catch (const std::exception& e) {  // memory, most likely: these sequences' states are half advanced
    for (const Piece& piece : pieces)
      finish(*piece.sequence, {.reason = FinishReason::kError, .error = e.what()});
    return;
  }
  for (const Piece& piece : pieces) {
    const auto& boundaries = piece.sequence->boundaries;
    if (std::binary_search(boundaries.begin(), boundaries.end(), piece.to))
      prefix_.insert(std::span(piece.sequence->media->keys()).first(piece.to),
                     state_.snapshot(piece.sequence->slot));
  }
  if (drawing.empty()) return;
  try {
    draw(drawing, logits);
    for (const Drawing& d : drawing) {
      if (!d.piece->drafts.empty()) take_back(d);
    }
  } catch (const std::exception& e) {  // of the device's
    for (const Piece& piece : pieces)
      finish(*piece.sequence, {.reason = FinishReason::kError, .error = e.what()});
  }
}

// Frees what the sequence holds and tells its owner. The object itself goes in drop_finished.
void Engine::finish(Sequence& s, Finish finish) {
  if (s.finished) return;
  s.finished = true;
  if (s.request->keep_state && !failed(finish.reason) && s.request->keep_state(s.choice)) {
    SwappedState state = s.slot >= 0 ? state_.swap_out(s.slot) : s.swapped ? *s.swapped : SwappedState{};
    if (state.length > 0) finish.state = std::make_shared<const SwappedState>(std::move(state));
  }
  if (s.slot >= 0) {
    state_.clear(s.slot);
    free_slots_.push_back(s.slot);
    s.slot = -1;
  }
  s.swapped.reset();
  ++(failed(finish.reason) ? stats_.failed : stats_.finished);
  finish.prompt_tokens = s.prompt_size();
  finish.cached_tokens = s.cached;
  finish.drawn_tokens = s.drawn();
  if (s.request->on_finish) s.request->on_finish(s.choice, finish);
}

void Engine::drop_finished() {
  std::erase_if(waiting_, [](const auto& s) { return s->finished; });
  std::erase_if(running_, [](const auto& s) { return s->finished; });
}

bool Engine::step() {
  take_inbox();
  admit();
  end_long_waits();
  std::vector<Piece> pieces = plan_step();
  const bool any = !pieces.empty();
  if (any) {
    ++stats_.steps;
    for (const std::vector<Piece>& call : calls_of(std::move(pieces))) feed(call);
  } else if (running_.empty() && !waiting_.empty()) {
    // Nothing runs and yet the first in the queue found no room, so it never will.
    finish(*waiting_.front(),
           {.reason = FinishReason::kNoRoom, .error = "the cache has no room for this sequence"});
  }
  drop_finished();
  publish();
  return any || !waiting_.empty();
}

void Engine::end_all(const std::string& reason) {
  take_inbox();
  const Finish end{.reason = FinishReason::kNoRoom, .error = reason};
  for (auto& s : waiting_) finish(*s, end);
  for (auto& s : running_) finish(*s, end);
  drop_finished();
  publish();
}

void Engine::run_until_idle() {
  while (step()) {
  }
}

void Engine::forget_prefixes() {
  check(running_.empty(), "engine: the prefixes of {} running sequences cannot be forgotten",
        running_.size());
  prefix_.clear();
}

void Engine::publish() {
  stats_.running = static_cast<int64_t>(running_.size());
  stats_.free_pages = state_.free_pages();
  stats_.pages = state_.pages();
  stats_.prefix_entries = prefix_.entries();
  stats_.prefix_bytes = prefix_.bytes();
  stats_.host_entries = prefix_.host_entries();
  stats_.host_bytes = prefix_.host_bytes();
  stats_.state_bytes = state_.bytes();
  const std::lock_guard lock(mutex_);
  stats_.waiting = static_cast<int64_t>(waiting_.size() + inbox_.size());
  published_ = stats_;
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  return published_;
}

}  // namespace godwit
