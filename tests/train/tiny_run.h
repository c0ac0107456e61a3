// Whole runs on a tiny model, in a directory of their own with packed data.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/data/pack.h"
#include "godwit/io/checkpoint_tensor.h"
#include "godwit/train/recipe.h"
#include "godwit/train/trainer.h"

namespace godwit::test {

namespace fs = std::filesystem;

inline constexpr int kRanks = 64;  // the test's tokenizer maps a byte to byte % 64

// Text with an obvious rule, so that a few steps learn something, packed into root/data.
inline void pack_tiny_data(const fs::path& root, int documents = 40) {
  fs::create_directories(root);
  std::ofstream text(root / "text.txt");
  for (int document = 0; document < documents; ++document) {
    for (int i = 0; i < 60; ++i) text << "abcdefgh"[(document + i) % 8] << (i % 3 == 0 ? "-" : "+");
    text << "\n\f\n";
  }
  text.close();
  data::PackOptions pack;
  pack.inputs = {root / "text.txt"};
  pack.out = root / "data";
  pack.holdout = 0.2;
  pack.tokenizer = {.encode =
                        [](std::string_view s, std::vector<int32_t>& ids) {
                          for (const unsigned char c : s) ids.push_back(c % kRanks);
                        },
                    .vocab_size = kRanks + 256,
                    .eos_id = kRanks + 1,
                    .bos_id = std::nullopt,
                    .hash = "test"};
  data::pack_corpus(pack);
}

inline Recipe tiny_recipe(const fs::path& root, const std::string& out,
                          const std::vector<std::string>& extra = {}) {
  const std::string toml = R"(
seed = 5
[model]
name = "nano"
[model.override]
hidden_size = 32
num_hidden_layers = 3
intermediate_size = 32
num_attention_heads = 2
num_key_value_heads = 2
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 16
num_experts = 16
num_experts_per_token = 2
moe_intermediate_size = 8
routed_expert_hidden_size = 16
linear_attn_config = {kda_layers = [1, 2], full_attn_layers = [3], num_heads = 2, head_dim = 16}
[[data]]
path = ")" + (root / "data").string() +
                           R"("
[optimizer]
muon_lr = 5e-3
adamw_lr = 5e-3
[[stage]]
name = "short"
context = 32
batch_tokens = 256
steps = 12
[[stage]]
name = "long"
context = 64
batch_tokens = 256
steps = 6
gate = 10.0
[train]
tensorboard = false
)";
  std::vector<std::string> overrides = {"out=" + (root / out).string()};
  overrides.insert(overrides.end(), extra.begin(), extra.end());
  return parse_recipe(toml, "test.toml", overrides);
}

// A fresh directory with the data in it.
class TinyRun : public ::testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(2);
    root_ = fs::temp_directory_path() / ("godwit_train_" + std::to_string(getpid()) +
                                         ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
    pack_tiny_data(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  Recipe recipe(const std::string& out, const std::vector<std::string>& extra = {}) {
    return tiny_recipe(root_, out, extra);
  }

  std::vector<nlohmann::json> metrics(const std::string& out) {
    std::ifstream file(root_ / out / "metrics.jsonl");
    std::vector<nlohmann::json> rows;
    for (std::string line; std::getline(file, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row.contains("loss")) rows.push_back(row);
    }
    return rows;
  }
  io::NamedTensors model(const std::string& out) {
    return io::load_tensors(root_ / out / "model" / "model.safetensors");
  }

  static std::string error_of(const Recipe& recipe, const RunOptions& options = {}) {
    try {
      run_training(recipe, options);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }

  fs::path root_;
};

}  // namespace godwit::test
