#include "godwit/model/layout.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/log.h"
#include "godwit/io/mxfp4.h"
#include "godwit/model/config_refused.h"
#include "godwit/model/weights.h"

namespace godwit {
namespace {

constexpr int64_t kPadDecay = 128;            // the released layout pads A_log to a multiple of this
constexpr int64_t kMostPieces = 100'000'000;  // a hundred MB of marks; Kimi K3 has 250,000
constexpr std::string_view kExperts = ".experts.";
constexpr std::string_view kDense = ".mlp.";
constexpr std::string_view kSparse = ".block_sparse_moe.";
constexpr std::string_view kWeight = ".weight";
constexpr std::string_view kPatchEmbedding = "vision_tower.patch_embed.proj.weight";

bool is_vision(std::string_view name) {
  return name.starts_with("vision_tower.") || name.starts_with("mm_projector.");
}

int64_t padded(int64_t n) {
  return (n + kPadDecay - 1) / kPadDecay * kPadDecay;
}

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
  if (info.name == kPatchEmbedding) {
    const int64_t p = config.vision->patch_size;
    return {info.shape[0], 3, p, p};
  }
  if (!is_a_log(info)) return info.shape;
  if (config.model_type == "kimi_linear") return {1, 1, info.shape[0], 1};
  return {padded(info.shape[0])};
}

bool is_float(io::Dtype dtype) {
  return dtype == io::Dtype::F64 || dtype == io::Dtype::F32 || dtype == io::Dtype::F16 ||
         dtype == io::Dtype::BF16;
}

// Collects what a scan of the files finds.
class Matcher {
 public:
  // `quantised`: config.json says that experts are packed.
  Matcher(const ModelConfig& config, bool quantised, const std::string& where)
      : quantised_(quantised),
        params_(stored_params(config, io::Dtype::F32, /*packed=*/false)),
        names_(params_),
        marks_(params_.size()) {
    int64_t pieces = 0;
    for (const StoredParam& param : params_) pieces += param.pieces();
    check(pieces <= kMostPieces, "{}: config.json has {} tensors, and more than {} are not looked for", where,
          pieces, kMostPieces);
    for (size_t p = 0; p < params_.size(); ++p) marks_[p].resize(params_[p].pieces());
  }

  void add(const io::StoredTensor& tensor) {
    ++result_.tensors;
    result_.bytes += tensor.end - tensor.begin;
    const auto place = names_.find(tensor.name);
    if (!place) {
      unexpected_.add(fmt::format("{} {}", tensor.name, io::shape_text(tensor.shape)));
      return;
    }
    StoredParam& param = params_[place->param];
    uint8_t& mark = marks_[place->param][place->piece];
    const auto bit = static_cast<uint8_t>(1 << static_cast<int>(place->part));
    if (mark & bit) twice_.add(tensor.name);  // under two names
    mark |= bit;
    if (param.vision) ++result_.vision;
    if (place->part != StoredPart::kWeight && !quantised_) unexplained_.add(tensor.name);
    check_shape(param, *place, tensor);
    const bool fits =
        place->part == StoredPart::kWeight ? is_float(tensor.dtype) : tensor.dtype == io::Dtype::U8;
    if (!fits) types_.add(fmt::format("{} {}", tensor.name, io::dtype_name(tensor.dtype)));
    if (place->part == StoredPart::kWeight && place->piece == 0) param.dtype = tensor.dtype;
    if (param.info.role != ParamRole::kExperts) param.info.name = tensor.name;
  }

  FoundModel finish(const std::string& faults) {
    const bool any_vision = result_.vision > 0;
    for (size_t p = 0; p < params_.size(); ++p) {
      if (!params_[p].vision || any_vision) finish(params_[p], marks_[p]);
    }
    std::string& text = result_.differences;
    missing_.print("missing", "; ", text);
    unexpected_.print("unexpected", "; ", text);
    twice_.print("there twice", "; ", text);
    shapes_.print("of another shape", "; ", text);
    types_.print("of a type that cannot be converted", "; ", text);
    unexplained_.print("packed without a 'quantization_config'", "; ", text);
    if (!faults.empty()) text += (text.empty() ? "" : "; ") + faults;
    if (!any_vision) std::erase_if(params_, [](const StoredParam& param) { return param.vision; });
    result_.params = std::move(params_);
    return std::move(result_);
  }

 private:
  static constexpr uint8_t kPlain = 1, kPair = 2 | 4;

  void check_shape(StoredParam& param, const StoredNames::Place& place, const io::StoredTensor& tensor) {
    if (is_a_log(param.info)) {  // in any of its forms
      const int64_t heads = param.info.shape[0];
      for (const auto& form : {std::vector<int64_t>{heads}, {1, 1, heads, 1}, {padded(heads)}}) {
        if (tensor.shape == form) param.shape = form;
      }
    }
    StoredParam as_found = param;
    as_found.packed = place.part != StoredPart::kWeight;
    if (as_found.packed && param.shape[1] % io::kMxfp4Group != 0) {
      shapes_.add(fmt::format("{} {}: MXFP4 needs an input width that is a multiple of {}, not {}",
                              tensor.name, io::shape_text(tensor.shape), io::kMxfp4Group, param.shape[1]));
      return;
    }
    const auto want = as_found.spec(place.piece, place.part).shape;
    if (tensor.shape != want) {
      shapes_.add(fmt::format("{} {} instead of {}", tensor.name, io::shape_text(tensor.shape),
                              io::shape_text(want)));
    }
  }

  void finish(StoredParam& param, const std::vector<uint8_t>& marks) {
    param.packed = std::ranges::any_of(marks, [](uint8_t mark) { return (mark & kPair) != 0; });
    const auto lacks = [&](int64_t piece, StoredPart part) {
      if (marks[piece] & (1 << static_cast<int>(part))) return;
      const io::TensorSpec spec = param.spec(piece, part);
      missing_.add(fmt::format("{} {}", spec.name, io::shape_text(spec.shape)));
    };
    for (int64_t piece = 0; piece < param.pieces(); ++piece) {
      if (!param.packed) {
        lacks(piece, StoredPart::kWeight);
        continue;
      }
      lacks(piece, StoredPart::kPacked);
      lacks(piece, StoredPart::kScale);
      if (marks[piece] & kPlain)
        unexpected_.add(param.name(piece, StoredPart::kWeight) + " beside packed experts");
    }
  }

  bool quantised_;
  std::vector<StoredParam> params_;
  StoredNames names_;
  std::vector<std::vector<uint8_t>> marks_;  // by parameter and piece: bits of the parts seen
  FoundModel result_;
  io::CaseList missing_, unexpected_, twice_, shapes_, types_, unexplained_;
};

// The layer of a name ("….layers.3.…"), if it has one.
std::optional<int64_t> layer_of(std::string_view name) {
  constexpr std::string_view kLayers = "model.layers.";
  const size_t at = name.find(kLayers);
  if (at == std::string_view::npos) return std::nullopt;
  int64_t layer = 0;
  std::from_chars(name.data() + at + kLayers.size(), name.data() + name.size(), layer);
  return layer;
}

}  // namespace

bool is_a_log(const ParamInfo& info) {
  return info.role == ParamRole::kDecay && info.name.ends_with("A_log");
}

std::string StoredParam::name(int64_t piece, StoredPart part) const {
  if (info.role != ParamRole::kExperts) return info.name;
  // "….experts.w1.weight", 7 -> "….experts.7.w1.weight_packed"
  const size_t end = info.name.size() - kWeight.size();
  const size_t matrix = info.name.rfind('.', end - 1);
  constexpr const char* kSuffix[] = {"", "_packed", "_scale"};
  return info.name.substr(0, matrix) + "." + std::to_string(piece) + info.name.substr(matrix) +
         kSuffix[static_cast<int>(part)];
}

io::TensorSpec StoredParam::spec(int64_t piece, StoredPart part) const {
  if (part == StoredPart::kWeight) return {name(piece, part), dtype, shape};
  const int64_t width = part == StoredPart::kPacked ? 2 : io::kMxfp4Group;
  return {name(piece, part), io::Dtype::U8, {shape[0], shape[1] / width}};
}

std::vector<StoredParam> stored_params(const ModelConfig& config, io::Dtype dtype, bool packed) {
  std::vector<StoredParam> out;
  ModelWeights structure = weight_structure(config);
  for_each_param(config, structure, [&](const ParamInfo& info, at::Tensor&) {
    StoredParam param{.info = info,
                      .shape = stored_shape(config, info),
                      .dtype = info.keep_fp32 ? io::Dtype::F32 : dtype,
                      .packed = packed && info.role == ParamRole::kExperts,
                      .vision = is_vision(info.name)};
    check(!param.packed || param.shape[1] % io::kMxfp4Group == 0,
          "{}: MXFP4 needs an input width that is a multiple of {}, got {}", info.name, io::kMxfp4Group,
          param.packed ? param.shape[1] : 0);
    out.push_back(std::move(param));
  });
  return out;
}

StoredNames::StoredNames(const std::vector<StoredParam>& params) : params_(params) {
  for (size_t p = 0; p < params.size(); ++p) {
    const std::string& name = params[p].info.name;
    by_name_.emplace(name, p);
    if (const size_t at = name.find(kDense); at != std::string::npos && !params[p].vision) {
      std::string other = name;
      other.replace(at, kDense.size(), kSparse);
      by_name_.emplace(std::move(other), p);
    }
  }
}

std::optional<StoredNames::Place> StoredNames::find(std::string_view name) const {
  const size_t experts = name.find(kExperts);
  const auto lookup = [&](const std::string& key, int64_t piece, StoredPart part) -> std::optional<Place> {
    const auto found = by_name_.find(key);
    if (found == by_name_.end()) return std::nullopt;
    if ((params_[found->second].info.role == ParamRole::kExperts) != (experts != std::string_view::npos))
      return std::nullopt;
    if (piece >= params_[found->second].pieces()) return std::nullopt;
    return Place{found->second, piece, part};
  };
  if (experts == std::string_view::npos) return lookup(std::string(name), 0, StoredPart::kWeight);
  const size_t begin = experts + kExperts.size();
  int64_t piece = -1;
  const auto [end, error] = std::from_chars(name.data() + begin, name.data() + name.size(), piece);
  const auto digits = static_cast<size_t>(end - (name.data() + begin));
  if (error != std::errc() || piece < 0 || std::to_string(piece).size() != digits) return std::nullopt;
  std::string key(name.substr(0, begin));
  std::string_view rest = name.substr(begin + digits);
  if (!rest.starts_with('.')) return std::nullopt;
  rest.remove_prefix(1);
  StoredPart part = StoredPart::kWeight;
  for (const auto& [suffix, kind] : {std::pair<std::string_view, StoredPart>{"_packed", StoredPart::kPacked},
                                     {"_scale", StoredPart::kScale}}) {
    if (!rest.ends_with(suffix)) continue;
    part = kind;
    rest.remove_suffix(suffix.size());
    break;
  }
  key += rest;
  return lookup(key, piece, part);
}

FoundModel find_model(const ModelConfig& config, const io::CheckpointDir& checkpoint) {
  const std::string directory = checkpoint.path().string();
  const bool configured = std::filesystem::exists(checkpoint.path() / "config.json");
  const bool quantised = !configured || has_quantization(load_model_json(directory));
  Matcher matcher(config, quantised, directory);
  const std::string faults = checkpoint.scan(
      [&](const io::SafetensorsFile&, const io::StoredTensor& tensor) { matcher.add(tensor); });
  FoundModel found = matcher.finish(faults);
  io::CaseList strays;
  for (std::string& file : checkpoint.stray_files()) strays.add(std::move(file));
  std::string text;
  strays.print("files are no part of the checkpoint and are not read", "", text);
  if (!text.empty()) found.warnings.push_back(directory + ": " + text);
  const std::optional<uint64_t> declared = checkpoint.declared_size();
  if (declared && *declared != found.bytes) {
    found.warnings.push_back(fmt::format("{}/{}: total_size is {}, the tensors have {} bytes", directory,
                                         io::kCheckpointIndexFile, *declared, found.bytes));
  }
  return found;
}

FoundModel require_model(const ModelConfig& config, const io::CheckpointDir& checkpoint) {
  FoundModel found = find_model(config, checkpoint);
  check(found.differences.empty(), "{}: the tensors do not fit config.json: {}", checkpoint.path().string(),
        found.differences);
  for (const std::string& warning : found.warnings) log_warn("{}", warning);
  return found;
}

std::vector<io::ShardPlan> plan_files(const ModelConfig& config, const std::vector<StoredParam>& params,
                                      uint64_t shard_bytes) {
  std::vector<io::TensorSpec> all;
  std::vector<int64_t> group;  // of each: its file in the released split
  const bool vision = std::ranges::any_of(params, [](const StoredParam& param) { return param.vision; });
  for (const StoredParam& param : params) {
    const std::string& name = param.info.name;
    const int64_t at = name.starts_with("vision_tower.")   ? config.layers + 2
                       : name.starts_with("mm_projector.") ? config.layers + 1
                                                           : layer_of(name).value_or(config.layers);
    for (int64_t piece = 0; piece < param.pieces(); ++piece) {
      if (param.packed) {
        all.push_back(param.spec(piece, StoredPart::kPacked));
        all.push_back(param.spec(piece, StoredPart::kScale));
      } else {
        all.push_back(param.spec(piece, StoredPart::kWeight));
      }
    }
    group.resize(all.size(), at);
  }
  std::vector<io::ShardPlan> plan = io::plan_shards(all, shard_bytes);
  if (plan.size() == 1 || config.model_type != "kimi_k3") return plan;
  plan.assign(config.layers + (vision ? 3 : 1), {});
  for (size_t i = 0; i < all.size(); ++i) plan[group[i]].tensors.push_back(std::move(all[i]));
  const auto count = static_cast<int64_t>(plan.size());
  for (int64_t i = 0; i < count; ++i) plan[i].file = io::shard_file_name(i + 1, count);
  return plan;
}

}  // namespace godwit
