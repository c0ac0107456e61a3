#include "godwit/model/checkpoint.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <nlohmann/json.hpp>
#include <span>

#include "godwit/base/check.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/io/finite.h"
#include "godwit/io/mxfp4.h"
#include "godwit/model/layout.h"
#include "godwit/ops/mxfp4_limit.h"

namespace godwit {
namespace {

using at::Tensor;

std::span<const uint8_t> as_u8(io::Bytes bytes) {
  return {reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()};
}

// One packed matrix in fp32; the scales may lie in another shard.
Tensor read_packed(const io::CheckpointDir& checkpoint, const StoredParam& param, int64_t piece) {
  const io::CheckpointDir::Found values = checkpoint.at(param.name(piece, StoredPart::kPacked));
  const io::CheckpointDir::Found scales = checkpoint.at(param.name(piece, StoredPart::kScale));
  Tensor out = at::empty(param.shape, at::kFloat);
  io::mxfp4_dequantize(as_u8(values.bytes), as_u8(scales.bytes),
                       {out.data_ptr<float>(), static_cast<size_t>(out.numel())});
  return out;
}

// Fills the parameters in the order of the files, so that each is read once and from front to back.
class Filler {
 public:
  Filler(const io::CheckpointDir& checkpoint, const std::vector<StoredParam>& params,
         const std::vector<Tensor*>& values)
      : checkpoint_(checkpoint), params_(params), names_(params), values_(values) {}

  void run() const {
    const std::string faults =
        checkpoint_.scan([&](const io::SafetensorsFile& file, const io::StoredTensor& tensor) {
          fill(file, tensor);
          file.mapping()->forget(file.bytes(tensor));
        });
    check(faults.empty(), "{}: {}", checkpoint_.path().string(), faults);
  }

 private:
  void fill(const io::SafetensorsFile& file, const io::StoredTensor& tensor) const {
    const auto place = names_.find(tensor.name);
    check(place.has_value(), "{}: unexpected tensor {}", file.path().string(), tensor.name);
    const StoredParam& param = params_[place->param];
    if (place->part == StoredPart::kScale) return;
    Tensor& value = *values_[place->param];
    const int64_t piece = param.info.role == ParamRole::kExperts ? place->piece : -1;
    check_values(file, tensor, param, *place, value.scalar_type());
    if (place->part == StoredPart::kPacked) {
      if (value.scalar_type() == at::kByte) return copy_packed(param, piece, as_matrix(param.info, value));
      return store_param(param.info, piece, read_packed(checkpoint_, param, piece), value);
    }
    Tensor stored = io::tensor_view(file, tensor);
    if (is_a_log(param.info)) {
      const int64_t heads = param.info.shape[0];
      stored = stored.reshape({-1});
      check(stored.slice(0, heads).eq(0).all().item<bool>(),
            "{}: {}: {} of {} entries are used, the rest must be 0", file.path().string(), tensor.name, heads,
            stored.numel());
      stored = stored.slice(0, 0, heads);
    }
    store_param(param.info, piece, stored, value);
  }

  // A value that is not finite in the type that it gets is refused, for it would only show in the logits.
  void check_values(const io::SafetensorsFile& file, const io::StoredTensor& tensor, const StoredParam& param,
                    const StoredNames::Place& place, at::ScalarType type) const {
    const std::string where = file.path().string() + ": " + tensor.name;
    if (place.part == StoredPart::kPacked) {
      const io::CheckpointDir::Found scales = checkpoint_.at(param.name(place.piece, StoredPart::kScale));
      const auto found = io::find_not_finite_mxfp4(as_u8(file.bytes(tensor)), as_u8(scales.bytes));
      return io::check_finite(found, where, param.shape, "MXFP4");
    }
    const bool packs = !at::isFloatingType(type);  // int8 or MXFP4
    const io::Dtype to = packs ? io::Dtype::F32 : io::from_scalar_type(type);
    const double limit = type == at::kByte ? io::kMxfp4Limit : io::finite_limit(to);
    io::check_finite(io::find_not_finite(file.bytes(tensor), tensor.dtype, limit), where, tensor.shape,
                     type == at::kByte ? "MXFP4" : io::dtype_name(to));
  }

  // An expert's MXFP4 bytes as they are.
  void copy_packed(const StoredParam& param, int64_t piece, const Matrix& value) const {
    const auto copy = [&](StoredPart part, const Tensor& all) {
      const Tensor to = all.select(0, piece), from = io::tensor_view(checkpoint_, param.name(piece, part));
      if (part == StoredPart::kScale) ops::check_mxfp4_scales(param.name(piece, part), from, value.device());
      to.copy_(from.view(to.sizes()));
    };
    copy(StoredPart::kPacked, value);
    copy(StoredPart::kScale, value.scale);
  }

  const io::CheckpointDir& checkpoint_;
  const std::vector<StoredParam>& params_;
  const StoredNames names_;
  const std::vector<Tensor*>& values_;
};

}  // namespace

at::ScalarType scalar_type_of(const std::string& dtype) {
  if (dtype == "float32") return at::kFloat;
  check(dtype == "bfloat16", "dtype must be \"float32\" or \"bfloat16\", got \"{}\"", dtype);
  return at::kBFloat16;
}

ModelWeights load_weights(const ModelConfig& config, const std::string& directory, at::Device device,
                          at::ScalarType dtype, const WeightFormat& format) {
  const at::NoGradGuard no_grad;
  const io::CheckpointDir checkpoint(directory);
  const FoundModel found = require_model(config, checkpoint);
  ModelWeights weights = weight_structure(config);
  if (found.vision == 0) weights.vision.reset();
  std::vector<Tensor*> values;
  for_each_param(config, weights, [&](const ParamInfo& info, Tensor& value) {
    allocate_param(info, format, device, dtype, value);
    values.push_back(&value);
  });
  Filler(checkpoint, found.params, values).run();
  return weights;
}

void save_weights(const ModelConfig& config, ModelWeights& weights, const std::string& directory) {
  const at::NoGradGuard no_grad;
  const at::ScalarType type = scalar_type_of(config.dtype);
  std::vector<StoredParam> params = stored_params(config, io::from_scalar_type(type), /*packed=*/false);
  if (!weights.vision) std::erase_if(params, [](const StoredParam& param) { return param.vision; });
  io::CheckpointWriter writer(directory, plan_files(config, params, kShardBytes));
  size_t next = 0;
  for_each_param(config, weights, [&](const ParamInfo& info, Tensor& value) {
    const StoredParam& param = params[next++];
    Tensor stored = value.detach().to(at::kCPU, info.keep_fp32 ? at::kFloat : type);
    if (info.role == ParamRole::kExperts) {
      for (int64_t e = 0; e < param.pieces(); ++e)
        io::write_tensor(writer, param.name(e, StoredPart::kWeight), stored.select(0, e));
      return;
    }
    const int64_t size = c10::multiply_integers(param.shape);
    if (size > stored.numel()) stored = at::constant_pad_nd(stored, {0, size - stored.numel()});  // A_log
    io::write_tensor(writer, info.name, stored.reshape(param.shape));
  });
  writer.commit();
  const auto write_json = [&](const char* name, const nlohmann::json& value) {
    io::write_file_atomic(io::fs::path(directory) / name, value.dump(2) + "\n");
  };
  write_json("config.json", to_json(config));
  nlohmann::json generation = nlohmann::json::object();  // what is not known is left out
  if (config.max_position > 0) generation["max_length"] = config.max_position;
  if (config.eos_id >= 0) generation["eos_token_id"] = config.eos_id;
  write_json("generation_config.json", generation);
}

}  // namespace godwit
