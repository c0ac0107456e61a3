// godwit_gradients MODEL IDS.json OUT.safetensors [PICTURES.safetensors]: the training loss of some documents
// and its gradient for every parameter, for comparison with other implementations (tests/python/). IDS.json
// is a list of documents, each a list of token ids; they go through packed, in one batch, and the loss is the
// mean over every token but each document's first. Everything in fp32. OUT has `loss` [1], `logits` [T, V],
// `routes.<layer>` [T, k] (the chosen experts of a MoE layer) and `grad.<parameter>`, named and shaped as
// for_each_param does (the experts of a layer are one tensor). PICTURES has `patches` [P, 3 p p] and `grids`
// [n, 3] int64 (frames, rows, columns) of the documents' pictures, in order; OUT then has `media` [M, D].
#include <ATen/ATen.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "godwit/base/file.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/model/checkpoint.h"
#include "godwit/model/forward.h"
#include "godwit/model/vision.h"
#include "godwit/ops/ops.h"

namespace godwit {
namespace {

struct Documents {
  PackedBatch batch;
  at::Tensor targets;  // [T] the next token, -100 at a document's end
  int64_t count = 0;   // of targets
};

Documents read_documents(const std::string& path) {
  std::vector<int64_t> ids, targets, lengths;
  Documents out;
  for (const auto& document : nlohmann::json::parse(read_file(path))) {
    const auto tokens = document.get<std::vector<int64_t>>();
    ids.insert(ids.end(), tokens.begin(), tokens.end());
    lengths.push_back(static_cast<int64_t>(tokens.size()));
    if (tokens.empty()) continue;
    targets.insert(targets.end(), tokens.begin() + 1, tokens.end());
    targets.push_back(-100);
    out.count += lengths.back() - 1;
  }
  out.batch = {.ids = at::tensor(ids, at::kLong), .cu_seqlens = make_cu_seqlens(lengths)};
  out.targets = at::tensor(targets, at::kLong);
  return out;
}

VisionInput read_pictures(const std::string& path) {
  VisionInput out;
  for (const auto& [name, tensor] : io::load_tensors(path)) {
    if (name == "patches") out.patches = tensor.clone();
    if (name != "grids") continue;
    for (int64_t i = 0; i < tensor.size(0); ++i) {
      const auto* grid = tensor.const_data_ptr<int64_t>() + 3 * i;
      out.grids.push_back({.frames = grid[0], .rows = grid[1], .columns = grid[2]});
    }
  }
  return out;
}

void write_gradients(const std::string& model, const std::string& ids, const std::string& out,
                     const std::string& pictures) {
  const ModelConfig config = load_model_config(model);
  ModelWeights weights = load_weights(config, model, at::kCPU, at::kFloat);
  set_requires_grad(config, weights, true);
  Documents documents = read_documents(ids);

  io::NamedTensors result;
  if (!pictures.empty()) {
    documents.batch.media = vision_forward(config, *weights.vision, read_pictures(pictures));
    result.emplace_back("media", documents.batch.media.detach());
  }
  ForwardOptions options;
  options.on_router = [&](const RouterTrace& trace) {
    result.emplace_back("routes." + std::to_string(trace.layer), trace.experts.detach().clone());
  };
  const at::Tensor hidden = forward_hidden(config, weights, documents.batch, nullptr, options);
  const at::Tensor& head = head_weight(config, weights);
  const at::Tensor weight =
      at::full({hidden.size(0)}, 1.0 / static_cast<double>(documents.count), at::kFloat);
  const at::Tensor loss = std::get<0>(ops::linear_cross_entropy(hidden, head, documents.targets, weight));
  loss.backward();
  result.emplace_back("loss", loss.detach().reshape({1}));
  result.emplace_back("logits", at::matmul(hidden.detach(), head.detach().t()).contiguous());
  for_each_param(config, weights, [&](const ParamInfo& info, at::Tensor& value) {
    if (info.role == ParamRole::kRouterBias) return;
    result.emplace_back("grad." + info.name,
                        value.grad().defined() ? value.grad().contiguous() : at::zeros_like(value));
  });
  io::save_tensors(out, result);
}

}  // namespace
}  // namespace godwit

int main(int argc, char** argv) {
  if (argc != 4 && argc != 5) {
    std::fprintf(stderr, "usage: godwit_gradients MODEL IDS.json OUT.safetensors [PICTURES.safetensors]\n");
    return 2;
  }
  try {
    godwit::write_gradients(argv[1], argv[2], argv[3], argc == 5 ? argv[4] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "godwit_gradients: %s\n", error.what());
    return 1;
  }
  return 0;
}
