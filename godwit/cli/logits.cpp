// `godwit logits`: a token sequence through the model, whole or in pieces on a carried state.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <numeric>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/cli/commands.h"
#include "godwit/cli/support.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/safetensors.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"

namespace godwit::cli {
namespace {

void append(const at::Tensor& logits, io::SafetensorsWriter& writer) {
  const at::Tensor rows = logits.to(at::kCPU, at::kFloat).contiguous();
  writer.append("logits", {static_cast<const std::byte*>(rows.data_ptr()), rows.nbytes()});
}

}  // namespace

int run_logits(const LogitsArgs& args) {
  const at::NoGradGuard no_grad;
  const at::Device device = apply_device(args.device);
  const ModelConfig config = load_model_config(args.model);
  const std::vector<int32_t> ids = parse_ids(read_file(args.tokens), config.vocab_size, args.tokens);
  const auto tokens = static_cast<int64_t>(ids.size());
  if (!args.split.empty()) {
    const int64_t sum = std::accumulate(args.split.begin(), args.split.end(), int64_t{0});
    check(sum == tokens, "--split: the pieces have {} tokens, {} has {}", sum, args.tokens, tokens);
  }
  const ModelWeights weights = load_weights(config, args.model, device, *scalar_type_option(args.dtype));
  const at::Tensor all = at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong).to(device);

  io::SafetensorsWriter writer(
      args.out, {{.name = "logits", .dtype = io::Dtype::F32, .shape = {tokens, config.vocab_size}}});
  if (args.split.empty()) {
    append(forward_logits(config, weights, {.ids = all, .cu_seqlens = make_cu_seqlens({tokens})}), writer);
  } else {
    ModelState state(config, {.sequences = 1}, device, weights.embed.scalar_type());
    int64_t at = 0;
    for (const int64_t piece : args.split) {
      const PackedBatch batch{.ids = all.narrow(0, at, piece), .cu_seqlens = make_cu_seqlens({piece})};
      append(forward_logits(config, weights, batch, &state), writer);
      at += piece;
    }
  }
  writer.commit();
  return 0;
}

}  // namespace godwit::cli
