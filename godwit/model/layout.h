// How the files of a Hugging Face directory hold a model: which tensors, under which names, in which shapes.
// As released: one tensor an expert ("….experts.7.w1.weight", or MXFP4 as weight_packed and weight_scale),
// convolutions [C, 1, W], AttnRes queries [1, D], A_log zero-padded to a multiple of 128 (Kimi K3) or
// [1, 1, H, 1] (Kimi-Linear).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "godwit/io/checkpoint_dir.h"
#include "godwit/io/tensor_spec.h"
#include "godwit/model/config.h"
#include "godwit/model/param.h"

namespace godwit {

enum class StoredPart { kWeight, kPacked, kScale };

// The tensors that hold one parameter.
struct StoredParam {
  ParamInfo info;              // as the model has it: experts [E, out, in], A_log [H], ...
  std::vector<int64_t> shape;  // of one stored tensor
  io::Dtype dtype = io::Dtype::F32;
  bool packed = false;  // kExperts: each a pair weight_packed [out, in/2], weight_scale [out, in/32], U8
  bool vision = false;  // of the vision tower or projector: a directory may be without them

  int64_t pieces() const { return info.role == ParamRole::kExperts ? info.shape[0] : 1; }
  std::string name(int64_t piece, StoredPart part) const;
  io::TensorSpec spec(int64_t piece, StoredPart part) const;
};

// Every parameter of the configuration in file order, the vision tower's last. Matrices, tables and norms in
// `dtype`, keep_fp32 parameters in F32; experts packed if `packed` (their input width must be a multiple of
// 32).
std::vector<StoredParam> stored_params(const ModelConfig& config, io::Dtype dtype, bool packed);

bool is_a_log(const ParamInfo& info);

// Finds the parameter of a tensor of a file.
class StoredNames {
 public:
  struct Place {
    size_t param;
    int64_t piece;
    StoredPart part;
  };
  explicit StoredNames(const std::vector<StoredParam>& params);
  // Also knows the dense layers' "mlp." under "block_sparse_moe.", as transformers' save_pretrained writes
  // it.
  std::optional<Place> find(std::string_view name) const;

 private:
  const std::vector<StoredParam>& params_;
  std::unordered_map<std::string, size_t> by_name_;
};

// What a directory holds of a model.
struct FoundModel {
  std::vector<StoredParam> params;  // as found: name, dtype, shape, packed or not; vision only if it is there
  // What does not fit, one line: of each kind the count and the first ten. Empty if everything does.
  std::string differences;
  // What is odd, but leaves the weights clear: a line each.
  std::vector<std::string> warnings;
  int64_t tensors = 0;  // in the files
  int64_t vision = 0;   // of them the vision tower's and the projector's
  uint64_t bytes = 0;
};

// Compares names, shapes and types, shard by shard; reads no weights and holds no list of them. Packed
// experts differ where the directory's config.json has no quantization_config: nothing says then what they
// are.
FoundModel find_model(const ModelConfig& config, const io::CheckpointDir& checkpoint);
// The same; an Error if anything differs, and the warnings are logged.
FoundModel require_model(const ModelConfig& config, const io::CheckpointDir& checkpoint);

// Files for these parameters: one up to `shard_bytes`; beyond it Kimi K3 as released (a file a layer, then
// embedding, head and final norms, projector, vision tower), anything else in files of that size.
std::vector<io::ShardPlan> plan_files(const ModelConfig& config, const std::vector<StoredParam>& params,
                                      uint64_t shard_bytes);

inline constexpr uint64_t kShardBytes = 5'000'000'000;  // the field's usual shard size

}  // namespace godwit
