#include "godwit/rl/replay.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "godwit/base/parallel.h"
#include "godwit/infer/prompt_media.h"
#include "godwit/infer/sampler.h"
#include "godwit/model/forward.h"
#include "godwit/model/state.h"
#include "godwit/ops/ops.h"

namespace godwit::rl {
namespace {

constexpr int64_t kPart = 64 * kLatentPage;  // tokens

// Entropy of what policy_logprob is the logarithm of.
double entropy_of(const float* logits, const bool* forbidden, int64_t size, double temperature) {
  if (temperature <= 0) return 0;
  double largest = -INFINITY, sum = 0, weighted = 0;
  for (int64_t i = 0; i < size; ++i)
    if (!forbidden[i]) largest = std::max(largest, static_cast<double>(logits[i]));
  for (int64_t i = 0; i < size; ++i) {
    if (forbidden[i]) continue;
    const double x = (logits[i] - largest) / temperature, weight = std::exp(x);
    sum += weight;
    weighted += weight * x;
  }
  return std::log(sum) - weighted / sum;
}

// Some trajectories side by side, segment by segment.
class Replay {
 public:
  Replay(const LoadedModel& model, std::span<const Trajectory* const> trajectories,
         const at::Tensor& forbidden, double temperature)
      : model_(model),
        trajectories_(trajectories),
        forbidden_(forbidden),
        temperature_(temperature),
        state_(model.config, {.sequences = static_cast<int64_t>(trajectories.size())}, model.device,
               model.weights.embed.scalar_type()),
        boundary_(trajectories.size()),
        pictures_(trajectories.size()),
        out_(trajectories.size()) {
    for (size_t i = 0; i < trajectories.size(); ++i) {
      out_[i].logp.assign(trajectories[i]->ids.size(), 0.0);
      out_[i].entropy.assign(trajectories[i]->ids.size(), 0.0);
      if (!trajectories[i]->media.empty())
        pictures_[i] = std::make_unique<PromptMedia>(model, trajectories[i]->ids, trajectories[i]->media);
    }
  }

  std::vector<Replayed> run() {
    size_t rounds = 0;
    for (const Trajectory* t : trajectories_) rounds = std::max(rounds, t->segments.size());
    for (size_t round = 0; round < rounds; ++round) segment(round);
    return std::move(out_);
  }

 private:
  // Tokens [from, to) of one trajectory.
  struct Piece {
    size_t trajectory = 0;
    int64_t from = 0, to = 0;
  };

  // Long pieces a part at a time: parts end at whole pages, where the bits do not depend on it.
  void feed_parts(std::vector<Piece> pieces, bool score) {
    for (;;) {
      std::vector<Piece> parts;
      for (Piece& p : pieces) {
        if (p.to - p.from <= kPart) continue;
        parts.push_back({.trajectory = p.trajectory, .from = p.from, .to = p.from + kPart});
        p.from += kPart;
      }
      if (parts.empty()) break;
      feed(parts, /*score=*/false);
    }
    feed(std::move(pieces), score);
  }

  // Feeds the pieces and scores the token that follows each.
  void feed(std::vector<Piece> pieces, bool score) {
    if (pieces.empty()) return;
    std::stable_partition(pieces.begin(), pieces.end(), [](const Piece& p) { return p.to - p.from == 1; });
    std::vector<int64_t> ids, lengths, sequences, last;
    std::vector<at::Tensor> media;
    for (const Piece& p : pieces) {
      const auto& tokens = trajectories_[p.trajectory]->ids;
      ids.insert(ids.end(), tokens.begin() + p.from, tokens.begin() + p.to);
      lengths.push_back(p.to - p.from);
      sequences.push_back(static_cast<int64_t>(p.trajectory));
      last.push_back(static_cast<int64_t>(ids.size()) - 1);
      if (!pictures_[p.trajectory]) continue;
      const at::Tensor vectors = pictures_[p.trajectory]->vectors(p.from, p.to);
      if (vectors.defined()) media.push_back(vectors);
    }
    const PackedBatch batch{.ids = at::tensor(ids, at::kLong).to(model_.device),
                            .cu_seqlens = make_cu_seqlens(lengths),
                            .sequences = sequences,
                            .media = media.empty() ? at::Tensor() : at::cat(media)};
    const at::Tensor hidden = forward_hidden(model_.config, model_.weights, batch, &state_);
    if (!score) return;
    const at::Tensor rows = hidden.index_select(0, at::tensor(last, at::kLong).to(model_.device));
    const at::Tensor logits =
        ops::linear(rows, head_weight(model_.config, model_.weights)).to(at::kCPU, at::kFloat).contiguous();
    parallel_for(0, static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Piece& p = pieces[i];
        const int32_t next = trajectories_[p.trajectory]->ids[p.to];
        out_[p.trajectory].logp[p.to] = policy_logprob(logits[i], forbidden_, temperature_, next);
        out_[p.trajectory].entropy[p.to] =
            entropy_of(logits.data_ptr<float>() + i * logits.size(1), forbidden_.data_ptr<bool>(),
                       logits.size(1), temperature_);
      }
    });
  }

  // Segment `round` of every trajectory that has one.
  void segment(size_t round) {
    std::vector<Piece> pages, rest;
    int64_t longest = 0;
    for (size_t i = 0; i < trajectories_.size(); ++i) {
      if (round >= trajectories_[i]->segments.size()) continue;
      const Segment& s = trajectories_[i]->segments[round];
      if (boundary_[i])
        state_.restore(static_cast<int64_t>(i), *boundary_[i]);
      else
        state_.clear(static_cast<int64_t>(i));
      const int64_t from = state_.length(static_cast<int64_t>(i));
      const int64_t page = s.begin / kLatentPage * kLatentPage;
      if (page > from) pages.push_back({.trajectory = i, .from = from, .to = page});
      if (s.begin > page) rest.push_back({.trajectory = i, .from = page, .to = s.begin});
      longest = std::max(longest, s.end - s.begin);
    }
    // Where the prompt ends at a page, its first drawn token is scored from the pages.
    std::vector<Piece> whole;
    for (const Piece& p : pages)
      if (trajectories_[p.trajectory]->segments[round].begin == p.to) whole.push_back(p);
    std::erase_if(pages,
                  [&](const Piece& p) { return trajectories_[p.trajectory]->segments[round].begin == p.to; });
    feed_parts(pages, /*score=*/false);
    feed_parts(whole, /*score=*/true);
    for (const auto* list : {&pages, &whole})
      for (const Piece& p : *list)
        boundary_[p.trajectory] = state_.snapshot(static_cast<int64_t>(p.trajectory));
    feed(rest, /*score=*/true);
    for (int64_t step = 0; step + 1 < longest; ++step) {
      std::vector<Piece> steps;
      for (size_t i = 0; i < trajectories_.size(); ++i) {
        if (round >= trajectories_[i]->segments.size()) continue;
        const Segment& s = trajectories_[i]->segments[round];
        const int64_t at = s.begin + step;
        if (at + 1 < s.end) steps.push_back({.trajectory = i, .from = at, .to = at + 1});
      }
      feed(steps, /*score=*/true);
    }
  }

  const LoadedModel& model_;
  std::span<const Trajectory* const> trajectories_;
  at::Tensor forbidden_;
  double temperature_;
  ModelState state_;
  std::vector<std::optional<StateSnapshot>> boundary_;  // at the last whole page of the prompts so far
  std::vector<std::unique_ptr<PromptMedia>> pictures_;  // of trajectories that have any
  std::vector<Replayed> out_;
};

}  // namespace

std::vector<Replayed> replay(const LoadedModel& model, std::span<const Trajectory* const> trajectories,
                             const at::Tensor& forbidden, double temperature, int64_t together) {
  const at::NoGradGuard no_grad;
  std::vector<Replayed> out;
  for (size_t begin = 0; begin < trajectories.size(); begin += static_cast<size_t>(together)) {
    const size_t count = std::min(trajectories.size() - begin, static_cast<size_t>(together));
    auto part = Replay(model, trajectories.subspan(begin, count), forbidden, temperature).run();
    std::move(part.begin(), part.end(), std::back_inserter(out));
  }
  return out;
}

at::Tensor rollout_forbidden(const LoadedModel& model) {
  std::vector<int32_t> allowed;
  for (const std::string_view name : {kOpen, kClose, kSep, kEndOfMsg})
    allowed.push_back(model.tokenizer.special_id(name));
  return forbidden_tokens(model, allowed);
}

}  // namespace godwit::rl
