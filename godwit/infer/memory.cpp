#include "godwit/infer/memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "godwit/base/check.h"

namespace godwit {
namespace {

constexpr int64_t kDefaultContext = 8192;  // of a sequence, in the default size of the cache
constexpr int64_t kLeastPrefill = 512;     // tokens of prompts in one step, of a size that was not asked for

int64_t whole_pages(int64_t tokens) {
  return (tokens + kLatentPage - 1) / kLatentPage * kLatentPage;
}

std::string mebibytes(int64_t bytes) {
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1 << 20));
}

// Floats that a row of a step needs at one time: the residual stream, the widest sub-layer twice.
int64_t row_floats(const ModelConfig& c) {
  const int64_t kda = 9 * c.kda.heads * c.kda.head_dim;
  const int64_t mla = c.mla.heads * (3 * c.mla.qk_dim() + 3 * c.mla.v_dim + 2 * c.mla.kv_lora_rank);
  const int64_t width = c.moe.latent > 0 ? c.moe.latent : c.hidden;
  const int64_t moe = 4 * c.moe.experts + c.moe.experts_per_token * (2 * width + 3 * c.moe.inner) +
                      3 * c.moe.shared_experts * c.moe.inner;
  const int64_t sources =
      c.attn_res == AttnResKind::kFull ? 2 * c.layers : c.layers / std::max<int64_t>(1, c.attn_res_block) + 2;
  return (sources + 6) * c.hidden + 2 * std::max({kda, mla, moe, 3 * c.intermediate});
}

}  // namespace

EngineMemory engine_memory(const ModelConfig& c, const EngineOptions& o, at::ScalarType dtype) {
  const auto element = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t rows = o.prefill_tokens + o.max_sequences * (1 + o.draft_tokens);
  const int64_t context = std::min(o.max_context, o.cache_tokens) + o.prefill_tokens;
  // A prompt's attention has keys and values of its whole context, and the rows they come from.
  const int64_t expanded =
      context * (c.mla.heads * (2 * c.mla.qk_dim() + 2 * c.mla.v_dim) + 2 * c.mla.kv_lora_rank);
  const int64_t logits = o.max_sequences * (1 + o.draft_tokens) * c.vocab_size;
  return {
      .slots = o.max_sequences * (o.draft_tokens > 0 ? 2 : 1) * ModelState::slot_bytes(c, dtype),
      .prefix = o.prefix.max_bytes,
      .pages = o.cache_tokens / kLatentPage * ModelState::page_bytes(c, o.fp8_latents ? kFp8Latent : dtype),
      .work = rows * row_floats(c) * 4 + expanded * element + logits * (4 + element)};
}

int64_t default_prefill_tokens(at::Device device) {
  return device.is_cpu() ? kLeastPrefill : 8192;
}

EngineOptions fit_options(const ModelConfig& config, EngineOptions o, at::ScalarType dtype,
                          at::Device device) {
  const int64_t limit = context_limit(config);
  if (o.max_context <= 0) o.max_context = limit;
  check(o.max_context <= limit, "engine: max_context {} is beyond the model's {}", o.max_context, limit);
  const bool own_pieces = o.prefill_tokens == 0;
  if (own_pieces) o.prefill_tokens = default_prefill_tokens(device);
  check(o.max_sequences > 0 && o.prefill_tokens > 0,
        "engine: max_sequences and prefill_tokens must be positive, got {} and {}", o.max_sequences,
        o.prefill_tokens);
  check(o.draft_tokens >= 0 && o.draft_tokens <= 64, "engine: draft_tokens must be 0 to 64, got {}",
        o.draft_tokens);
  o.prefill_tokens = whole_pages(o.prefill_tokens);
  const bool chosen = o.cache_tokens > 0;
  if (!chosen) o.cache_tokens = o.max_sequences * std::min(o.max_context, kDefaultContext);
  o.cache_tokens = whole_pages(o.cache_tokens);
  if (o.memory_bytes <= 0) return o;
  const int64_t wanted = o.cache_tokens;
  const auto fits = [&](int64_t tokens) {
    o.cache_tokens = tokens;
    return engine_memory(config, o, dtype).total() <= o.memory_bytes;
  };
  while (own_pieces && o.prefill_tokens > kLeastPrefill && !fits(wanted)) o.prefill_tokens /= 2;
  if (fits(wanted)) return o;
  int64_t low = 0, high = wanted / kLatentPage;  // pages: low fits (or is 0), high does not
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (fits(middle * kLatentPage) ? low : high) = middle;
  }
  o.cache_tokens = chosen || low == 0 ? wanted : low * kLatentPage;
  if (!chosen && low > 0) return o;
  const EngineMemory m = engine_memory(config, o, dtype);
  fail(
      "engine: {} needed for {} sequences and a cache of {} tokens (states {}, cached prefixes {}, latents "
      "{}, a "
      "step {}), {} free: {}",
      mebibytes(m.total()), o.max_sequences, wanted, mebibytes(m.slots), mebibytes(m.prefix),
      mebibytes(m.pages), mebibytes(m.work), mebibytes(o.memory_bytes),
      low > 0
          ? fmt::format("{} tokens would fit", low * kLatentPage)
          : std::string("not even one page of tokens fits: fewer sequences, or a shorter context, might"));
}

}  // namespace godwit
