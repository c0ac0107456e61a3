// The decoder: embedding, layers on an attention-residual stream, final norm.
#include "godwit/model/forward.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/model/layers.h"
#include "godwit/ops/layer_step.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The residual state between decoder layers (arXiv:2603.15031; report eq. 8 to 10).
// kNone: `partial` is the plain residual. kBlock: `blocks` are the finished block sums (the embedding first),
// `partial` the live one. kFull: `blocks` are the embedding and every sub-layer's output, `partial` is not
// used.
struct Stream {
  std::vector<Tensor> blocks;
  Tensor partial;

  std::vector<Tensor> sources() const {
    std::vector<Tensor> all = blocks;
    if (partial.defined()) all.push_back(partial);
    return all;
  }
};

// What one decoder layer needs besides the stream. Lives as long as the forward and its backward.
struct LayerCall {
  const ModelConfig& config;
  const LayerWeights& weights;
  int64_t layer;
  Tensor cu_seqlens;
  Tensor position;
  LayerState* state;
  std::shared_ptr<const StatePlaces> places;  // with a state, but not for a segment that carries its own
  ForwardOptions options;
};

Tensor mix(const ModelConfig& config, const Stream& stream, const Tensor& norm, const Tensor& query) {
  if (config.attn_res == AttnResKind::kNone) return stream.partial;
  const std::vector<Tensor> sources = stream.sources();
  if (sources.size() == 1) return sources[0];
  return ops::attn_res_mix(sources, norm, query, config.rms_norm_eps);
}

// rms_norm(mix, weight), as the sub-layers take it.
Tensor normed_mix(const LayerCall& call, const Stream& stream, const Tensor& norm, const Tensor& query,
                  const Tensor& weight) {
  const double eps = call.config.rms_norm_eps;
  if (call.places && call.places->fused) {
    const bool plain = call.config.attn_res == AttnResKind::kNone;
    return ops::mix_norm_step(plain ? std::vector<Tensor>{stream.partial} : stream.sources(), norm, query,
                              weight, eps);
  }
  return ops::rms_norm(mix(call.config, stream, norm, query), weight, eps);
}

// Identity on y whose backward also sends gradient 1 to `loss`: adds a loss term from the middle of the
// network.
struct AttachLoss : torch::autograd::Function<AttachLoss> {
  static Tensor forward(AutogradContext*, const Tensor& y, const Tensor&) { return y.view_as(y); }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0], at::ones({}, grads[0].options().dtype(at::kFloat))};
  }
};

Tensor token_mixer(const LayerCall& call, const Tensor& x, bool first_run) {
  if (call.weights.kda) {
    return kda_layer(call.config, *call.weights.kda, x, call.cu_seqlens,
                     call.state ? &call.state->kda : nullptr, call.places.get());
  }
  Tensor max_logit;
  const bool watch = first_run && call.options.on_max_logit;
  const MlaContext context{.cu_seqlens = call.cu_seqlens,
                           .position = call.position,
                           .pages = call.places ? &call.state->pages : nullptr,
                           .places = call.places.get(),
                           .rows = call.state && !call.places ? &call.state->pages : nullptr,
                           .max_logit = watch ? &max_logit : nullptr,
                           .qk_limit = call.options.qk_limit};
  const Tensor out = mla_layer(call.config, *call.weights.mla, x, context);
  if (max_logit.defined()) call.options.on_max_logit(call.layer, max_logit);
  return out;
}

Tensor channel_mixer(const LayerCall& call, const Tensor& x, bool first_run) {
  if (call.places && call.places->fused) {
    return call.weights.mlp ? mlp_layer_step(call.config, *call.weights.mlp, x)
                            : moe_layer_step(call.config, *call.weights.moe, x);
  }
  if (call.weights.mlp) return mlp_layer(call.config, *call.weights.mlp, x);
  RouterTrace trace;
  Tensor out = moe_layer(call.config, *call.weights.moe, x, &trace);
  trace.layer = call.layer;
  trace.cu_seqlens = call.cu_seqlens;
  if (first_run && call.options.on_router) call.options.on_router(trace);
  if (call.options.router_loss && at::GradMode::is_enabled()) {
    const Tensor loss = call.options.router_loss(trace);
    if (loss.defined()) out = AttachLoss::apply(out, loss);
  }
  return out;
}

// One decoder layer. Returns the tensors it adds to the stream: the new partial sum, or (kFull) both
// sub-layers' outputs.
std::vector<Tensor> decoder_layer(const LayerCall& call, Stream stream, bool first_run) {
  const ModelConfig& config = call.config;
  const LayerWeights& w = call.weights;
  const Tensor a =
      token_mixer(call, normed_mix(call, stream, w.attn_res_norm, w.attn_res_query, w.input_norm), first_run);
  if (config.attn_res == AttnResKind::kFull) {
    stream.blocks.push_back(a);
  } else if (config.attn_res == AttnResKind::kBlock && call.layer % config.attn_res_block == 0) {
    stream.blocks.push_back(stream.partial);  // the block that ended, or the embedding
    stream.partial = a;
  } else {
    stream.partial = stream.partial + a;
  }
  const Tensor m =
      channel_mixer(call, normed_mix(call, stream, w.mlp_res_norm, w.mlp_res_query, w.post_norm), first_run);
  if (config.attn_res == AttnResKind::kFull) return {a, m};
  return {stream.partial + m};
}

// The stream after layer `layer`, given what decoder_layer returned.
Stream advance(const ModelConfig& config, int64_t layer, Stream stream, const std::vector<Tensor>& added) {
  if (config.attn_res == AttnResKind::kFull) {
    stream.blocks.insert(stream.blocks.end(), added.begin(), added.end());
    return stream;
  }
  if (config.attn_res == AttnResKind::kBlock && layer % config.attn_res_block == 0)
    stream.blocks.push_back(stream.partial);
  stream.partial = added[0];
  return stream;
}

Stream from_tensors(const ModelConfig& config, std::vector<Tensor> tensors) {
  Stream stream;
  if (config.attn_res != AttnResKind::kFull) {
    stream.partial = tensors.back();
    tensors.pop_back();
  }
  stream.blocks = std::move(tensors);
  return stream;
}

// Runs a decoder layer without a graph and again, with one, in the backward (Chen et al., arXiv:1604.06174).
struct Recompute : torch::autograd::Function<Recompute> {
  static variable_list forward(AutogradContext* ctx, const std::shared_ptr<LayerCall>& call,
                               at::TensorList inputs) {
    ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(call));
    ctx->save_for_backward(inputs.vec());
    const at::NoGradGuard no_grad;
    return decoder_layer(*call, from_tensors(call->config, inputs.vec()), /*first_run=*/true);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto holder = ctx->saved_data["call"].toCapsule();
    const LayerCall& call = *static_cast<Holder*>(holder.get())->call;
    std::vector<Tensor> inputs;
    for (const Tensor& saved : ctx->get_saved_variables())
      inputs.push_back(saved.detach().requires_grad_(saved.is_floating_point()));
    variable_list outputs;
    {
      const at::AutoGradMode grad_mode(true);
      outputs = decoder_layer(call, from_tensors(call.config, inputs), /*first_run=*/false);
    }
    torch::autograd::backward(outputs, grads);
    variable_list result = {Tensor()};
    for (const Tensor& input : inputs) result.push_back(input.grad());
    return result;
  }

  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<LayerCall> c) : call(std::move(c)) {}
    std::shared_ptr<LayerCall> call;
  };
};

void check_inputs(const ModelConfig& config, const PackedBatch& batch, const ModelState* state) {
  check(batch.ids.dim() == 1 && batch.ids.scalar_type() == at::kLong, "forward: ids must be [T] int64");
  check(batch.cu_seqlens.dim() == 1 && batch.cu_seqlens.device().is_cpu() &&
            batch.cu_seqlens.scalar_type() == at::kLong,
        "forward: cu_seqlens must be [N+1] int64 on the CPU");
  if (batch.ids.numel() > 0) {
    const auto [low, high] = at::aminmax(batch.ids);
    check(low.item<int64_t>() >= 0 && high.item<int64_t>() < config.vocab_size,
          "forward: token ids must lie in [0, {}), found {} to {}", config.vocab_size, low.item<int64_t>(),
          high.item<int64_t>());
  }
  if (state) check(!at::GradMode::is_enabled(), "forward: a state cannot be used with gradients");
}

std::string placeholder_fault(const ModelConfig& config, int64_t places, int64_t vectors) {
  return fmt::format(
      "there are {} <|media_pad|> tokens (id {}) in the text for the {} vectors of its pictures", places,
      config.media_id, vectors);
}

// Token embeddings, with a picture's vectors in the places of its placeholders.
Tensor embed(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch) {
  Tensor embedded = at::embedding(weights.embed, batch.ids);
  if (!batch.media.defined()) return embedded;
  const Tensor places = at::nonzero(batch.ids.eq(config.media_id)).squeeze(1);
  check(places.size(0) == batch.media.size(0), "{}",
        placeholder_fault(config, places.size(0), batch.media.size(0)));
  check(batch.media.size(1) == config.hidden, "forward: a picture's vectors have {} values, expected {}",
        batch.media.size(1), config.hidden);
  return embedded.index_copy(0, places, batch.media.to(embedded.scalar_type()));
}

Stream first_stream(const ModelConfig& config, const Tensor& embedded) {
  Stream stream;
  if (config.attn_res == AttnResKind::kFull)
    stream.blocks = {embedded};
  else
    stream.partial = embedded;
  return stream;
}

// What each step row sees: the rows of its sequence up to its own.
void place_steps(const PackedBatch& batch, StatePlaces& out) {
  const int64_t N = out.step_sequences;
  if (out.steps == N) {  // one row a sequence
    out.step_slots = out.slots.narrow(0, 0, N);
    out.step_table = out.table.narrow(0, 0, N);
    out.step_lengths = out.lengths.narrow(0, 0, N);
    return;
  }
  const auto* cu = batch.cu_seqlens.data_ptr<int64_t>();
  Tensor sequence_of_row = at::empty({out.steps}, at::kLong);
  out.step_lengths = at::empty({out.steps}, at::kLong);
  for (int64_t i = 0; i < N; ++i) {
    for (int64_t t = cu[i]; t < cu[i + 1]; ++t) {
      sequence_of_row.data_ptr<int64_t>()[t] = i;
      out.step_lengths.data_ptr<int64_t>()[t] = out.lengths.data_ptr<int64_t>()[i] - (cu[i + 1] - 1 - t);
    }
  }
  out.step_slots = out.slots.index_select(0, sequence_of_row);
  out.step_table = out.table.index_select(0, sequence_of_row);
}

// Makes room in the state and says where its sequences stand.
StatePlaces place(const PackedBatch& batch, ModelState& state) {
  const auto* cu = batch.cu_seqlens.data_ptr<int64_t>();
  std::vector<int64_t> sequences = batch.sequences;
  if (sequences.empty()) {
    for (int64_t n = 0; n < state.sequences(); ++n) sequences.push_back(n);
  }
  const auto N = static_cast<int64_t>(sequences.size());
  check(N == batch.cu_seqlens.numel() - 1, "forward: the state has {} sequences, the batch {}", N,
        batch.cu_seqlens.numel() - 1);
  StatePlaces out;
  out.record = batch.record;
  out.slots = at::tensor(sequences, at::kLong);
  out.lengths = at::empty({N}, at::kLong);
  std::vector<bool> seen(state.sequences(), false);
  int64_t most_pages = 1;
  for (int64_t i = 0; i < N; ++i) {
    const int64_t n = sequences[i], tokens = cu[i + 1] - cu[i];
    check(n >= 0 && n < state.sequences() && !seen[n], "forward: sequence {} is not one of {} or comes twice",
          n, state.sequences());
    seen[n] = true;
    check(state.reserve(n, tokens), "forward: the state has no pages for {} more tokens of sequence {}",
          tokens, n);
    if (batch.step_sequences >= 0 ? i < batch.step_sequences : tokens == 1) {
      check(out.step_sequences == i, "forward: with a state, sequences of one token come first");
      ++out.step_sequences;
      out.steps += tokens;
    }
    out.lengths.data_ptr<int64_t>()[i] = state.length(n) + tokens;
    most_pages = std::max(most_pages, state.sequence(n).pages.size());
  }
  out.table = at::zeros({N, most_pages}, at::kInt);
  out.rows = at::empty({cu[N]}, at::kLong);
  for (int64_t i = 0; i < N; ++i) {
    const SequenceState& sequence = state.sequence(sequences[i]);
    auto* table = out.table.data_ptr<int32_t>() + i * most_pages;
    for (int64_t page = 0; page < sequence.pages.size(); ++page) table[page] = sequence.pages[page];
    for (int64_t t = cu[i]; t < cu[i + 1]; ++t) {
      const int64_t at = sequence.length + t - cu[i];
      out.rows.data_ptr<int64_t>()[t] = table[at / kLatentPage] * kLatentPage + at % kLatentPage;
    }
  }
  place_steps(batch, out);
  out.slots_on = out.slots.to(batch.ids.device());
  out.rows = out.rows.to(batch.ids.device());
  return out;
}

// Positions [T] of the batch's tokens in their sequences.
Tensor positions(const PackedBatch& batch, const StatePlaces* places) {
  const auto* cu = batch.cu_seqlens.data_ptr<int64_t>();
  Tensor out = at::empty({batch.ids.size(0)}, at::kLong);
  for (int64_t n = 0; n + 1 < batch.cu_seqlens.numel(); ++n) {
    const int64_t end = places ? places->lengths[n].item<int64_t>() : cu[n + 1] - cu[n];
    for (int64_t t = cu[n]; t < cu[n + 1]; ++t) out.data_ptr<int64_t>()[t] = end - (cu[n + 1] - t);
  }
  return out.to(batch.ids.device());
}

// What one forward call works on.
struct ForwardRun {
  const PackedBatch& batch;
  std::vector<LayerState>* state;  // by layer
  const ForwardOptions& options;
  std::shared_ptr<const StatePlaces> places;  // with a state
  Tensor position;
};

// All layers, and the final norm of the mix.
Tensor run_layers(const ModelConfig& config, const ModelWeights& weights, const ForwardRun& run,
                  Stream stream) {
  const bool recompute = run.options.recompute && at::GradMode::is_enabled();
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const auto call =
        std::make_shared<LayerCall>(LayerCall{.config = config,
                                              .weights = weights.layers[layer],
                                              .layer = layer,
                                              .cu_seqlens = run.batch.cu_seqlens,
                                              .position = run.position,
                                              .state = run.state ? &(*run.state)[layer] : nullptr,
                                              .places = run.places,
                                              .options = run.options});
    const std::vector<Tensor> sources = stream.sources();
    const std::vector<Tensor> added = recompute ? Recompute::apply(call, at::TensorList(sources))
                                                : decoder_layer(*call, stream, /*first_run=*/true);
    stream = advance(config, layer, std::move(stream), added);
    if (run.options.on_layer) run.options.on_layer(layer, added.back().detach());
  }
  const Tensor h = mix(config, stream, weights.out_res_norm, weights.out_res_query);
  return ops::rms_norm(h, weights.norm, config.rms_norm_eps);
}

}  // namespace

Tensor forward_hidden(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                      ModelState* state, const ForwardOptions& options) {
  check_inputs(config, batch, state);
  const auto places = state ? std::make_shared<StatePlaces>(place(batch, *state)) : nullptr;
  const Tensor position = config.mla.rotary ? positions(batch, places.get()) : Tensor();
  const Tensor embedded = embed(config, weights, batch);
  Stream stream = first_stream(config, embedded);
  if (places) {
    places->fused = places->steps == batch.ids.size(0) && places->steps > 0 &&
                    ops::takes_layer_step(embedded) && !state->fp8_latents() && !options.on_router &&
                    !options.on_max_logit;
  }
  Tensor out;
  const auto run = [&] {
    out = run_layers(config, weights, {batch, state ? &state->layers() : nullptr, options, places, position},
                     std::move(stream));
  };
  if (places && places->fused)
    with_awake_threads(run);
  else
    run();
  if (state) {
    const auto* cu = batch.cu_seqlens.data_ptr<int64_t>();
    const auto* slots = places->slots.data_ptr<int64_t>();
    for (int64_t n = 0; n + 1 < batch.cu_seqlens.numel(); ++n) state->advance(slots[n], cu[n + 1] - cu[n]);
  }
  return out;
}

Tensor forward_segment(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                       int64_t begin, std::vector<LayerState>& carried, const ForwardOptions& options) {
  check_inputs(config, batch, /*state=*/nullptr);
  check(batch.cu_seqlens.numel() == 2 && static_cast<int64_t>(carried.size()) == config.layers,
        "forward: a segment is of one sequence, with what each of {} layers carries", config.layers);
  check(!options.recompute, "forward: a segment is not computed again in its backward");
  const Tensor position =
      config.mla.rotary ? at::arange(begin, begin + batch.ids.size(0), batch.ids.options()) : Tensor();
  return run_layers(config, weights, {batch, &carried, options, nullptr, position},
                    first_stream(config, embed(config, weights, batch)));
}

Tensor forward_device_step(const ModelConfig& config, const ModelWeights& weights, const DeviceStep& step,
                           ModelState& state, std::vector<ops::KdaDecodeArgs>* kept) {
  check(!config.mla.rotary, "forward: recorded steps know no rotation of positions");
  const int64_t B = step.slots.size(0), rows = B * step.tokens;
  auto places = std::make_shared<StatePlaces>();
  places->step_sequences = places->steps = rows;
  places->on_device = true;
  places->tokens = step.tokens;
  places->kept = kept;
  if (kept) {
    kept->clear();
    places->keep = at::zeros_like(step.slots);
  }
  places->step_slots = step.slots;
  const Tensor slot_of_row = step.slots.clamp_min(0).unsqueeze(1).expand({B, step.tokens}).reshape({rows});
  places->step_table = step.tables.index_select(0, slot_of_row);
  places->step_lengths = step.lengths;
  places->rows = step.rows;
  const PackedBatch batch{.ids = step.ids, .cu_seqlens = at::arange(rows + 1, at::kLong)};
  return run_layers(config, weights, {batch, &state.layers(), {}, places, Tensor()},
                    first_stream(config, at::embedding(weights.embed, step.ids)));
}

void keep_device_step(const std::vector<ops::KdaDecodeArgs>& kept, const Tensor& n) {
  for (ops::KdaDecodeArgs args : kept) {
    args.keep = n;
    ops::kda_decode(args);
  }
}

void replay_steps(const ModelConfig& config, const ModelWeights& weights, ModelState& state, int64_t sequence,
                  int64_t first, int64_t count) {
  const Tensor slots = at::full({count}, sequence, at::kLong);
  const auto replay = [&] {
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      KdaState& kda = state.layers()[layer].kda;
      if (weights.layers[layer].kda)
        kda_replay(config, *weights.layers[layer].kda, kda, kda.step_inputs.narrow(0, first, count), slots);
    }
  };
  if (count > 0) with_awake_threads(replay);
}

const Matrix& head_weight(const ModelConfig& config, const ModelWeights& weights) {
  return config.tie_embeddings ? weights.embed : weights.lm_head;
}

Tensor forward_logits(const ModelConfig& config, const ModelWeights& weights, const PackedBatch& batch,
                      ModelState* state) {
  return ops::linear(forward_hidden(config, weights, batch, state), head_weight(config, weights))
      .to(at::kFloat);
}

Tensor media_of(const ModelConfig& config, const PackedBatch& batch, int64_t begin, int64_t n) {
  if (!batch.media.defined()) return {};
  const Tensor is_place = batch.ids.eq(config.media_id);
  const auto count = [&](const Tensor& part) { return part.sum().item<int64_t>(); };
  check(count(is_place) == batch.media.size(0), "{}",
        placeholder_fault(config, count(is_place), batch.media.size(0)));
  return batch.media.narrow(0, count(is_place.narrow(0, 0, begin)), count(is_place.narrow(0, begin, n)));
}

Tensor make_cu_seqlens(const std::vector<int64_t>& lengths) {
  Tensor cu = at::zeros({static_cast<int64_t>(lengths.size()) + 1}, at::kLong);
  auto* out = cu.data_ptr<int64_t>();
  for (size_t n = 0; n < lengths.size(); ++n) out[n + 1] = out[n] + lengths[n];
  return cu;
}

}  // namespace godwit
