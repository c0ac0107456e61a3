// The engine's drawing: from logits to the next token of each sequence, and what follows from it.
#include <ATen/ATen.h>

#include <algorithm>
#include <exception>

#include "godwit/base/parallel.h"
#include "godwit/infer/engine_sequence.h"
#include "godwit/infer/sampler.h"
#include "godwit/model/forward.h"

namespace godwit {

// A copy in pinned memory, valid until the next.
at::Tensor Engine::on_host(const at::Tensor& logits) {
  if (logits.device().is_cpu()) return logits.to(at::kFloat);
  const int64_t rows = logits.size(0);
  if (!host_logits_.defined() || host_logits_.size(0) < rows) {
    host_logits_ = at::empty({std::max(rows, options_.max_sequences), logits.size(1)},
                             at::TensorOptions(at::kFloat).pinned_memory(true));
  }
  const at::Tensor out = host_logits_.narrow(0, 0, rows);
  out.copy_(logits.to(at::kFloat));
  return out;
}

void Engine::draw(std::vector<Drawing>& drawings, const at::Tensor& logits) {
  std::vector<Drawing*> here, there;  // where they are drawn: on the host, on the device
  for (Drawing& d : drawings) {
    const bool device = !logits.is_cpu() && !fixed_shapes_ && d.piece->sequence->draws_on_device();
    (device ? there : here).push_back(&d);
  }
  if (!there.empty()) draw_there(there, logits);
  while (!here.empty()) {
    draw_rows(here, logits);
    std::erase_if(here, [](const Drawing* d) { return !d->goes_on; });
  }
}

// A token from a row on the host.
Engine::Outcome Engine::draw_here(Sequence& s, const at::Tensor& row) const {
  try {
    at::Tensor forbidden = s.early() ? s.forbidden_early : s.forbidden;
    if (s.constraint) {
      forbidden = forbidden.clone();
      s.constraint->forbid(forbidden);
    }
    Outcome out(s.request->forced
                    ? forced_token(row, s.sampling, forbidden, s.request->forced(s.choice, s.drawn()))
                    : sample(row, s.sampling, s.size(), forbidden, s.uses_history ? &s.history : nullptr),
                "");
    if (s.request->top_logprobs > 0) out.token.top = likeliest(row, s.request->top_logprobs);
    return out;
  } catch (const std::exception& e) {
    return {{}, e.what()};
  }
}

// One token of each, on the host.
void Engine::draw_rows(const std::vector<Drawing*>& drawings, const at::Tensor& logits) {
  std::vector<Outcome> outcomes(drawings.size());
  std::vector<int64_t> rows;
  for (const Drawing* d : drawings) rows.push_back(d->row + d->taken);
  at::Tensor host = logits;
  if (!logits.is_cpu())
    host = on_host(logits.index_select(0, at::tensor(rows, at::kLong).to(logits.device())));
  parallel_for(0, static_cast<int64_t>(rows.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      outcomes[i] = draw_here(*drawings[i]->piece->sequence, host[logits.is_cpu() ? rows[i] : i]);
  });
  for (size_t i = 0; i < drawings.size(); ++i) take_outcome(*drawings[i], std::move(outcomes[i]));
}

// From all rows at once: what is drawn there depends on no token drawn before.
void Engine::draw_there(const std::vector<Drawing*>& drawings, const at::Tensor& logits) {
  std::vector<DeviceDraw> draws;
  for (const Drawing* d : drawings) {
    for (int64_t i = 0; i <= d->drafts(); ++i) draws.push_back(d->on_device(logits.device(), i));
  }
  const std::vector<DeviceOutcome> drawn = draw_on_device(logits, draws);
  size_t at = 0;
  for (Drawing* d : drawings) {
    const size_t next = at + static_cast<size_t>(d->drafts()) + 1;
    for (; at < next && d->goes_on; ++at) take_outcome(*d, Outcome(drawn[at].sampled, drawn[at].error));
    at = next;
  }
}

// A sequence goes on to its next row where it drew what was fed there.
void Engine::take_outcome(Drawing& d, Outcome outcome) {
  Sequence& s = *d.piece->sequence;
  const std::vector<int32_t>& drafts = d.piece->drafts;
  if (!outcome.error.empty()) {
    finish(s, {.reason = FinishReason::kError, .error = outcome.error});
    d.goes_on = false;
    return;
  }
  const bool drafted = d.taken < d.drafts() && outcome.token.id == drafts[d.taken];
  take_token(s, std::move(outcome.token));
  ++d.taken;
  stats_.accepted_tokens += drafted ? 1 : 0;
  d.goes_on = drafted && !s.finished;
}

// The state stands behind all drafts; it goes back behind the tokens that were drawn. The last drawn token is
// fed in the next step, as ever.
void Engine::take_back(const Drawing& d) {
  const Piece& piece = *d.piece;
  const int64_t fed = piece.tokens(), slot = piece.sequence->slot;
  if (piece.sequence->finished || d.taken == fed) return;
  state_.rewind(slot, piece.before, fed);
  replay_steps(model_.config, model_.weights, state_, slot, d.call_row, d.taken);
  state_.advance(slot, d.taken);
}

// The same after a recorded step, which left the states where they were.
void Engine::keep_drawn(const std::vector<Drawing>& drawings) {
  std::vector<int64_t> taken;
  for (const Drawing& d : drawings) taken.push_back(d.piece->sequence->finished ? 0 : d.taken);
  graphs_->keep(taken);
}

void Engine::take_token(Sequence& s, DrawnToken token) {
  const Request& request = *s.request;
  const int32_t id = token.id;
  ++stats_.drawn_tokens;
  if (std::find(request.stop_ids.begin(), request.stop_ids.end(), id) != request.stop_ids.end()) {
    finish(s, {.reason = FinishReason::kStop, .stop_id = id});
    return;
  }
  s.tokens.push_back(id);
  if (s.uses_history) ++s.history.drawn[id];
  try {
    if (s.constraint) s.constraint->accept(id);
    if (request.on_token && !request.on_token(s.choice, token)) {
      finish(s, {.reason = FinishReason::kCancelled});
      return;
    }
  } catch (const std::exception& e) {
    finish(s, {.reason = FinishReason::kError, .error = e.what()});
    return;
  }
  if (s.drawn() >= request.max_tokens || s.size() >= max_context_)
    finish(s, {.reason = FinishReason::kLength});
}

}  // namespace godwit
