// What an engine takes of the device's memory, from the configuration alone, before anything is allocated.
#pragma once

#include <cstdint>

#include "godwit/infer/engine.h"

namespace godwit {

// Bytes on the device beside the weights.
struct EngineMemory {
  int64_t slots = 0;   // KDA and convolution states of the sequences that run together
  int64_t prefix = 0;  // and of cached prefixes
  int64_t pages = 0;   // latents
  int64_t work = 0;    // the largest step: activations, keys and values of a prompt's context, logits
  int64_t total() const { return slots + prefix + pages + work; }
};

// `options` with its zeros filled in (see fit_options). Slots and pages are exact, the formulas of
// ModelState; work is an estimate from above.
EngineMemory engine_memory(const ModelConfig& config, const EngineOptions& options, at::ScalarType dtype);

// Checks the options, fills in what is 0, and rounds to pages. cache_tokens = 0 becomes max_sequences times
// at most 8,192 tokens, or fewer where options.memory_bytes holds no more. Throws Error when what is asked
// for does not fit into memory_bytes, with the parts and the number of tokens that would fit.
// prefill_tokens = 0 becomes what `device` likes, halved while memory_bytes does not hold the step.
EngineOptions fit_options(const ModelConfig& config, EngineOptions options, at::ScalarType dtype,
                          at::Device device = at::kCPU);

// Tokens of prompts in one step: products of as many rows as keep a GPU busy.
int64_t default_prefill_tokens(at::Device device);

}  // namespace godwit
