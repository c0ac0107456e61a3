// A model directory with everything in it: the tiny K3 model, random weights, the fixture's tokenizer.
#pragma once

#include <string>

#include "godwit/base/file.h"
#include "godwit/model/checkpoint.h"
#include "godwit/text/tokenizer.h"
#include "tests/model/tiny.h"
#include "tests/support/files.h"

namespace godwit::test {

inline const ModelConfig& directory_config() {
  static const ModelConfig config = [] {
    ModelConfig c = tiny_config();
    c.vocab_size = Tokenizer::load(GODWIT_FIXTURES "/tokenizer").vocab_size();
    c.max_position = 4096;
    return c;
  }();
  return config;
}

// Made once; the tests do not change it.
inline const std::string& tiny_directory() {
  static const testing::ScratchDir dir;
  static const std::string path = [] {
    ModelWeights weights = init_weights(directory_config(), 7, at::kCPU, at::kFloat);
    save_weights(directory_config(), weights, dir.path());
    Tokenizer::load(GODWIT_FIXTURES "/tokenizer").save(dir.path());
    return dir.path().string();
  }();
  return path;
}

// A copy that a test may damage.
class TinyCopy {
 public:
  TinyCopy() {
    for (const auto& entry : std::filesystem::directory_iterator(tiny_directory()))
      std::filesystem::copy(entry.path(), dir_.path() / entry.path().filename());
  }
  std::string path() const { return dir_.path(); }
  std::filesystem::path operator/(const std::string& name) const { return dir_ / name; }

 private:
  testing::ScratchDir dir_;
};

}  // namespace godwit::test
