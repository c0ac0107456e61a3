#include "godwit/train/checkpoint.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "godwit/base/check.h"
#include "tests/support/files.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST(Checkpoint, DamagedOnesAreAnErrorAndNotABeginning) {
  const testing::ScratchDir scratch;
  const fs::path root = scratch / "checkpoints";
  EXPECT_FALSE(load_newest_checkpoint(root).has_value());
  for (const int64_t step : {3, 7})
    save_checkpoint(root, {.step = step, .meta = {{"tokens", step}}, .tensors = {{"w", at::ones({4})}}},
                    /*keep=*/2);
  EXPECT_EQ(load_newest_checkpoint(root)->step, 7);
  fs::resize_file(root / "step-7/state.safetensors", 50);
  EXPECT_EQ(load_newest_checkpoint(root)->step, 3);
  fs::remove(root / "step-3/checkpoint.json");
  try {
    load_newest_checkpoint(root);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("checkpoints: no checkpoint is whole, the newest is step-7"));
  }
}

}  // namespace
}  // namespace godwit
