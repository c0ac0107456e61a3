// Where `godwit convert` reads from: a Hugging Face directory, or a checkpoint of a training run.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "godwit/io/file.h"
#include "godwit/model/config.h"
#include "godwit/model/layout.h"

namespace godwit {

// One stored tensor, or the pair of an MXFP4 one. When it goes, so does the memory of the file's pages.
struct StoredPiece {
  using Mapping = std::shared_ptr<const io::MappedFile>;

  io::Dtype dtype = io::Dtype::F32;
  io::Bytes bytes = {};
  io::Bytes scales = {};  // of a packed one
  Mapping mapping = {};
  Mapping scales_mapping = {};

  StoredPiece() = default;
  StoredPiece(io::Dtype type, io::Bytes content, Mapping map)
      : dtype(type), bytes(content), mapping(std::move(map)) {}
  StoredPiece(StoredPiece&&) = default;
  StoredPiece& operator=(StoredPiece&&) = default;
  ~StoredPiece() {
    if (mapping) mapping->forget(bytes);
    if (scales_mapping) scales_mapping->forget(scales);
  }
};

class ConvertSource {
 public:
  virtual ~ConvertSource() = default;
  virtual StoredPiece read(const StoredParam& param, int64_t piece) const = 0;
  // Files are read one after another: pieces are asked for in this order within one file that is written.
  virtual uint32_t file_of(const StoredParam& param, int64_t piece) const = 0;

  const std::string& path() const { return path_; }
  const ModelConfig& config() const { return config_; }
  const nlohmann::json& json() const { return json_; }                // config.json as it is
  const std::vector<StoredParam>& params() const { return params_; }  // in the order of stored_params()
  int64_t tensors() const { return tensors_; }
  // What goes along with the weights: tokenizer, generation and processor settings, texts.
  const std::vector<std::filesystem::path>& other_files() const { return other_files_; }

 protected:
  std::string path_;
  ModelConfig config_;
  nlohmann::json json_;
  std::vector<StoredParam> params_;
  int64_t tensors_ = 0;
  std::vector<std::filesystem::path> other_files_;
};

// IN of the command line. Everything is checked before it returns.
std::unique_ptr<ConvertSource> open_convert_source(const std::string& path);

}  // namespace godwit
