#include "godwit/model/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <nlohmann/json.hpp>
#include <span>

#include "godwit/base/check.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/mxfp4.h"
#include "godwit/io/tensor_spec.h"

namespace godwit {
namespace {

using at::Tensor;

constexpr uint64_t kShardBytes = 5'000'000'000;  // the field's usual shard size
constexpr int64_t kPadDecay = 128;               // the released layout pads A_log to a multiple of this

bool is_a_log(const ParamInfo& info) {
  return info.role == ParamRole::kDecay && info.name.ends_with("A_log");
}

int64_t padded(int64_t n) {
  return (n + kPadDecay - 1) / kPadDecay * kPadDecay;
}

// "….experts.w1.weight", 7 -> "….experts.7.w1" + suffix.
std::string expert_name(const std::string& name, int64_t expert, const char* suffix) {
  const size_t end = name.rfind(".weight");
  const size_t matrix = name.rfind('.', end - 1);
  return name.substr(0, matrix) + "." + std::to_string(expert) + name.substr(matrix, end - matrix) + suffix;
}

// The shape a tensor has in the file (of one expert, for kExperts).
std::vector<int64_t> stored_shape(const ModelConfig& config, const ParamInfo& info) {
  switch (info.role) {
    case ParamRole::kConv:
      return {info.shape[0], 1, info.shape[1]};
    case ParamRole::kQuery:
      return {1, info.shape[0]};
    case ParamRole::kExperts:
      return {info.shape[1], info.shape[2]};
    default:
      break;
  }
  if (!is_a_log(info)) return info.shape;
  if (config.model_type == "kimi_linear") return {1, 1, info.shape[0], 1};
  return {padded(info.shape[0])};
}

// The tensors of the file that hold one parameter.
struct Expected {
  ParamInfo info;
  std::vector<io::TensorSpec> stored;  // one; of kExperts one an expert, or packed and scale an expert
  bool packed = false;
};

io::TensorSpec spec(std::string name, io::Dtype dtype, std::vector<int64_t> shape) {
  return {.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
}

// The name that a file has for a tensor of the dense layers: transformers' save_pretrained writes them under
// the name of the sparse ones.
std::string found_name(const std::string& name, const io::CheckpointDir* found) {
  constexpr std::string_view kDense = ".mlp.";
  const size_t at = name.find(kDense);
  if (!found || at == std::string::npos || found->contains(name)) return name;
  std::string other = name;
  other.replace(at, kDense.size(), ".block_sparse_moe.");
  return found->contains(other) ? other : name;
}

// What the directory should hold for one parameter, given what it does hold (packed experts, A_log in any of
// its shapes).
Expected expect(const ModelConfig& config, const ParamInfo& info, io::Dtype dtype,
                const io::CheckpointDir* found) {
  Expected out{.info = info, .stored = {}};
  std::vector<int64_t> shape = stored_shape(config, info);
  if (info.role != ParamRole::kExperts) {
    if (found && is_a_log(info) && found->contains(info.name)) {
      const std::vector<int64_t>& there = found->at(info.name).tensor->shape;
      const int64_t heads = info.shape[0];
      if (there == info.shape || there == std::vector<int64_t>{1, 1, heads, 1}) shape = there;
    }
    out.stored.push_back(spec(found_name(info.name, found), info.keep_fp32 ? io::Dtype::F32 : dtype, shape));
    return out;
  }
  out.packed = found && found->contains(expert_name(info.name, 0, ".weight_packed"));
  for (int64_t e = 0; e < info.shape[0]; ++e) {
    if (!out.packed) {
      out.stored.push_back(spec(expert_name(info.name, e, ".weight"), dtype, shape));
      continue;
    }
    check(shape[1] % io::kMxfp4Group == 0, "{}: MXFP4 needs an input width that is a multiple of {}, got {}",
          info.name, io::kMxfp4Group, shape[1]);
    out.stored.push_back(
        spec(expert_name(info.name, e, ".weight_packed"), io::Dtype::U8, {shape[0], shape[1] / 2}));
    out.stored.push_back(spec(expert_name(info.name, e, ".weight_scale"), io::Dtype::U8,
                              {shape[0], shape[1] / io::kMxfp4Group}));
  }
  return out;
}

std::vector<Expected> expect_all(const ModelConfig& config, io::Dtype dtype, const io::CheckpointDir* found) {
  std::vector<Expected> all;
  ModelWeights structure = weight_structure(config);
  for_each_param(config, structure,
                 [&](const ParamInfo& info, Tensor&) { all.push_back(expect(config, info, dtype, found)); });
  return all;
}

bool is_vision(std::string_view name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

std::span<const uint8_t> packed_bytes(const io::CheckpointDir::Found& found) {
  check(found.tensor->dtype == io::Dtype::U8, "{}: MXFP4 data must be U8, got {}", found.tensor->name,
        io::dtype_name(found.tensor->dtype));
  return {reinterpret_cast<const uint8_t*>(found.bytes.data()), found.bytes.size()};
}

Tensor read_packed(const io::CheckpointDir& checkpoint, const Expected& want, int64_t expert) {
  const io::CheckpointDir::Found values = checkpoint.at(want.stored[2 * expert].name);
  const io::CheckpointDir::Found scales = checkpoint.at(want.stored[2 * expert + 1].name);
  Tensor out = at::empty({want.info.shape[1], want.info.shape[2]}, at::kFloat);
  io::mxfp4_dequantize(packed_bytes(values), packed_bytes(scales),
                       {out.data_ptr<float>(), static_cast<size_t>(out.numel())});
  return out;
}

Tensor read_param(const io::CheckpointDir& checkpoint, const Expected& want, at::Device device,
                  at::ScalarType dtype) {
  const ParamInfo& info = want.info;
  const at::ScalarType type = info.keep_fp32 ? at::kFloat : dtype;
  if (info.role == ParamRole::kExperts) {
    Tensor value = at::empty(info.shape, at::TensorOptions().dtype(type).device(device));
    for (int64_t e = 0; e < info.shape[0]; ++e) {
      Tensor slice = value.select(0, e);
      if (want.packed)
        slice.copy_(read_packed(checkpoint, want, e));
      else
        io::read_into(checkpoint, want.stored[e].name, io::Cast::kFloating, slice);
    }
    return value;
  }
  Tensor value = io::read_tensor(checkpoint, want.stored[0].name, type, io::Cast::kFloating);
  if (is_a_log(info)) {
    const int64_t heads = info.shape[0];
    value = value.reshape({-1});
    check(value.slice(0, heads).eq(0).all().item<bool>(), "{}: {} of {} entries are used, the rest must be 0",
          info.name, heads, value.numel());
    value = value.slice(0, 0, heads).clone();
  }
  return value.reshape(info.shape).to(device);
}

}  // namespace

at::ScalarType scalar_type_of(const std::string& dtype) {
  if (dtype == "float32") return at::kFloat;
  check(dtype == "bfloat16", "dtype must be \"float32\" or \"bfloat16\", got \"{}\"", dtype);
  return at::kBFloat16;
}

ModelWeights load_weights(const ModelConfig& config, const std::string& directory, at::Device device,
                          at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  const io::CheckpointDir checkpoint(directory);
  const std::vector<Expected> wanted = expect_all(config, io::Dtype::F32, &checkpoint);
  std::vector<io::TensorSpec> specs, found;
  for (const Expected& want : wanted) specs.insert(specs.end(), want.stored.begin(), want.stored.end());
  for (io::TensorSpec& s : checkpoint.specs()) {
    if (!is_vision(s.name)) found.push_back(std::move(s));
  }
  const io::SpecDifferences differences = io::compare_specs(specs, found, io::DtypeCheck::kIgnore);
  if (!differences.none()) {
    std::string text = differences.text;  // its lines become one
    while (!text.empty() && text.back() == '\n') text.pop_back();
    for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n'))
      text.replace(at, 1, "; ");
    fail("{}: the tensors do not fit config.json: {}", directory, text);
  }
  ModelWeights weights = weight_structure(config);
  size_t next = 0;
  for_each_param(config, weights, [&](const ParamInfo&, Tensor& value) {
    value = read_param(checkpoint, wanted[next++], device, dtype);
  });
  return weights;
}

void save_weights(const ModelConfig& config, ModelWeights& weights, const std::string& directory) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = scalar_type_of(config.dtype);
  const std::vector<Expected> wanted = expect_all(config, io::from_scalar_type(type), nullptr);
  std::vector<io::TensorSpec> specs;
  for (const Expected& want : wanted) specs.insert(specs.end(), want.stored.begin(), want.stored.end());
  io::CheckpointWriter writer(directory, io::plan_shards(specs, kShardBytes));
  size_t next = 0;
  for_each_param(config, weights, [&](const ParamInfo& info, Tensor& value) {
    const Expected& want = wanted[next++];
    Tensor stored = value.detach().to(at::kCPU, info.keep_fp32 ? at::kFloat : type);
    if (info.role == ParamRole::kExperts) {
      for (int64_t e = 0; e < info.shape[0]; ++e)
        io::write_tensor(writer, want.stored[e].name, stored.select(0, e));
      return;
    }
    if (is_a_log(info) && config.model_type != "kimi_linear")
      stored = at::constant_pad_nd(stored, {0, padded(info.shape[0]) - info.shape[0]});
    io::write_tensor(writer, info.name, stored.reshape(want.stored[0].shape));
  });
  writer.commit();
  const auto write_json = [&](const char* name, const nlohmann::json& value) {
    io::write_file_atomic(io::fs::path(directory) / name, value.dump(2) + "\n");
  };
  write_json("config.json", to_json(config));
  write_json("generation_config.json",
             {{"max_length", config.max_position}, {"eos_token_id", config.eos_id}});
}

}  // namespace godwit
