#include "godwit/infer/session.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>

#include "godwit/base/check.h"
#include "godwit/model/checkpoint.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// True at special tokens (and at ids without a token) that may not be drawn.
at::Tensor forbidden_tokens(const LoadedModel& model, const GenerateOptions& options) {
  at::Tensor mask = at::zeros({model.config.vocab_size}, at::kBool);
  mask.slice(0, model.tokenizer.ranks()).fill_(true);
  for (const auto* ids : {&options.stop_ids, &options.allowed_specials}) {
    for (const int32_t id : *ids) mask[id] = false;
  }
  return mask;
}

}  // namespace

LoadedModel load_model(const std::string& directory, at::Device device, std::optional<at::ScalarType> dtype) {
  const ModelConfig config = load_model_config(directory);
  Tokenizer tokenizer = Tokenizer::load(directory);
  check(tokenizer.vocab_size() <= config.vocab_size,
        "{}: the tokenizer has {} ids, the model's vocabulary {}", directory, tokenizer.vocab_size(),
        config.vocab_size);
  return {.config = config,
          .weights = load_weights(config, directory, device, dtype.value_or(scalar_type_of(config.dtype))),
          .tokenizer = std::move(tokenizer),
          .device = device};
}

std::vector<int32_t> text_stop_ids(const LoadedModel& model) {
  std::vector<int32_t> ids;
  for (const std::string_view name : {kEos, kEndOfMsg}) {
    if (const auto id = model.tokenizer.find_special(name)) ids.push_back(*id);
  }
  if (model.config.eos_id >= 0) ids.push_back(static_cast<int32_t>(model.config.eos_id));
  return ids;
}

Session::Session(const LoadedModel& model)
    : model_(model), state_(make_state(model.config, 1, model.device, model.weights.embed.scalar_type())) {}

at::Tensor Session::feed(std::span<const int32_t> ids) {
  const at::NoGradGuard no_grad;
  check(!ids.empty(), "session: no token to feed");
  at::Tensor hidden;
  for (size_t begin = 0; begin < ids.size(); begin += kPrefillPiece) {
    const auto part = ids.subspan(begin, std::min<size_t>(kPrefillPiece, ids.size() - begin));
    const std::vector<int64_t> piece(part.begin(), part.end());
    const PackedBatch batch{.ids = at::tensor(piece).to(model_.device),
                            .cu_seqlens = make_cu_seqlens({static_cast<int64_t>(piece.size())})};
    hidden = forward_hidden(model_.config, model_.weights, batch, &state_);
  }
  return ops::linear(hidden.slice(0, -1), head_weight(model_.config, model_.weights))
      .to(at::kCPU, at::kFloat)[0];
}

Generation Session::generate(std::span<const int32_t> prompt, const GenerateOptions& options,
                             const std::function<bool(int32_t)>& on_token) {
  check(!prompt.empty(), "the prompt has no token");
  const at::Tensor forbidden = forbidden_tokens(model_, options);
  Generation out;
  out.prompt_tokens = static_cast<int64_t>(prompt.size());
  auto start = std::chrono::steady_clock::now();
  at::Tensor logits = feed(prompt);
  out.prefill_s = seconds_since(start);
  start = std::chrono::steady_clock::now();
  out.finish_reason = "length";
  while (static_cast<int64_t>(out.ids.size()) < options.max_tokens) {
    const Sampled next = sample(logits, options.sampling, tokens(), forbidden);
    const auto id = static_cast<int32_t>(next.id);
    const bool stop =
        std::find(options.stop_ids.begin(), options.stop_ids.end(), id) != options.stop_ids.end();
    if (!stop) {
      out.ids.push_back(id);
      out.logprobs.push_back(next.logprob);
    }
    const bool go_on = stop || !on_token || on_token(id);
    if (stop || !go_on) {
      out.finish_reason = stop ? "stop" : "cancelled";
      feed({&id, 1});
      break;
    }
    logits = feed({&id, 1});
  }
  out.decode_s = seconds_since(start);
  return out;
}

}  // namespace godwit
