// `godwit train` on the tiny recipe and the data that ship with the tests.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace godwit::test {

inline std::vector<std::string> train_arguments(const std::filesystem::path& out,
                                                const std::vector<std::string>& more = {},
                                                bool resume = false) {
  const std::string fixtures = std::string(GODWIT_FIXTURES) + "/tiny";
  std::vector<std::string> args = {"train",
                                   std::string(GODWIT_SOURCE_DIR) + "/configs/recipes/tiny-smoke.toml"};
  std::vector<std::string> set = {"out=" + out.string(), "data.0.path=" + fixtures + "/data",
                                  "tokenizer=" + fixtures + "/tokenizer", "stage.0.steps=6",
                                  "stage.1.steps=2"};
  set.insert(set.end(), more.begin(), more.end());
  for (const std::string& value : set) {
    args.push_back("--set");
    args.push_back(value);
  }
  if (resume) args.push_back("--resume");
  return args;
}

}  // namespace godwit::test
