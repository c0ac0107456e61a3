#include "godwit/model/convert_source.h"

#include <algorithm>
#include <array>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/io/jsonl.h"
#include "godwit/io/snapshot.h"
#include "godwit/model/config_source.h"
#include "godwit/model/weights.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using std::string_view;

constexpr const char* kState = "state.safetensors";  // as train/checkpoint.cpp writes them
constexpr const char* kMeta = "checkpoint.json";
constexpr const char* kStatePrefix = "weights.";

// Weights in other formats stay behind: they would be out of date, and large.
bool goes_along(const fs::path& file) {
  constexpr std::array<string_view, 8> kNot = {".safetensors", ".bin", ".pt",      ".pth",
                                               ".gguf",        ".h5",  ".msgpack", ".onnx"};
  const std::string name = file.filename().string();
  return fs::is_regular_file(file) && !name.starts_with('.') && name != "config.json" &&
         name != io::kCheckpointIndexFile &&
         std::ranges::find(kNot, string_view(file.extension().native())) == kNot.end();
}

class DirectorySource : public ConvertSource {
 public:
  explicit DirectorySource(const std::string& path) : checkpoint_(path) {
    path_ = path;
    json_ = load_model_json(path);
    config_ = parse_model_config(json_, model_json_path(path));
    FoundModel found = require_model(config_, checkpoint_);
    params_ = std::move(found.params);
    tensors_ = found.tensors;
    for (const auto& entry : fs::directory_iterator(path)) {
      if (goes_along(entry.path())) other_files_.push_back(entry.path());
    }
    std::ranges::sort(other_files_);
  }

  StoredPiece read(const StoredParam& param, int64_t piece) const override {
    const auto values = checkpoint_.at(name_of(param, piece));
    StoredPiece out(values.tensor->dtype, values.bytes, values.file->mapping());
    if (param.packed) {
      const auto scales = checkpoint_.at(param.name(piece, StoredPart::kScale));
      out.scales = scales.bytes;
      out.scales_mapping = scales.file->mapping();
    }
    return out;
  }

  uint32_t file_of(const StoredParam& param, int64_t piece) const override {
    return checkpoint_.shard_of(name_of(param, piece));
  }

 private:
  static std::string name_of(const StoredParam& param, int64_t piece) {
    return param.name(piece, param.packed ? StoredPart::kPacked : StoredPart::kWeight);
  }

  io::CheckpointDir checkpoint_;
};

// RUN/checkpoints/step-N: one file, the experts of a layer one tensor.
class SnapshotSource : public ConvertSource {
 public:
  explicit SnapshotSource(const std::string& path) : file_(verified(path) / kState) {
    path_ = path;
    const nlohmann::json meta = io::read_json(fs::path(path) / kMeta);
    check(meta.contains("config"), "{}: no 'config': the checkpoint was written before they had one",
          (fs::path(path) / kMeta).string());
    json_ = meta.at("config");
    config_ = parse_model_config(json_, (fs::path(path) / kMeta).string());
    params_ = stored_params(config_, io::Dtype::F32, /*packed=*/false);
    std::erase_if(params_, [&](const StoredParam& param) {  // a run without pictures may have no tower
      return param.vision && !file_.find(kStatePrefix + param.info.name);
    });
    io::CaseList missing, shapes;
    for (StoredParam& param : params_) {
      const io::StoredTensor* tensor = file_.find(kStatePrefix + param.info.name);
      if (!tensor) {
        missing.add(param.info.name);
        continue;
      }
      if (tensor->shape != param.info.shape)
        shapes.add(fmt::format("{} {} instead of {}", tensor->name, io::shape_text(tensor->shape),
                               io::shape_text(param.info.shape)));
      param.dtype = tensor->dtype;
    }
    std::string text;
    missing.print("missing", "; ", text);
    shapes.print("of another shape", "; ", text);
    check(text.empty(), "{}: the tensors do not fit the configuration: {}", file_.path().string(), text);
    tensors_ = static_cast<int64_t>(params_.size());
    // The run's tokenizer lies with its newest model.
    const fs::path model = fs::absolute(path).lexically_normal().parent_path().parent_path() / "model";
    for (const char* name : {"tiktoken.model", "tokenizer_config.json"}) {
      if (fs::exists(model / name)) other_files_.push_back(model / name);
    }
  }

  StoredPiece read(const StoredParam& param, int64_t piece) const override {
    const io::StoredTensor& tensor = file_.at(kStatePrefix + param.info.name);
    io::Bytes bytes = file_.bytes(tensor);
    const size_t size = bytes.size() / static_cast<size_t>(param.pieces());
    bytes = bytes.subspan(static_cast<size_t>(piece) * size, size);
    return {tensor.dtype, bytes, file_.mapping()};
  }

  uint32_t file_of(const StoredParam&, int64_t) const override { return 0; }

 private:
  static fs::path verified(const fs::path& path) {
    io::verify_snapshot(path, io::SnapshotCheck::kChecksums);
    return path;
  }

  io::SafetensorsFile file_;
};

}  // namespace

std::unique_ptr<ConvertSource> open_convert_source(const std::string& path) {
  check(fs::is_directory(path), "{}: not a directory", path);
  if (fs::exists(fs::path(path) / io::kSnapshotFile)) return std::make_unique<SnapshotSource>(path);
  return std::make_unique<DirectorySource>(path);
}

}  // namespace godwit
