#include "godwit/data/eval_reader.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/data/small_dataset.h"
#include "tests/support/files.h"

namespace godwit::data {
namespace {

using testing::expect_error;
using testing::ScratchDir;

TEST(EvalReader, EveryTokenOnceInOrder) {
  const ScratchDir dir;
  const std::vector<uint64_t> lengths{5, 0, 1, 64, 257, 17, 3, 65, 0};
  const auto dataset = small_dataset(dir / "d", lengths);
  for (const int64_t length : {1, 2, 16, 63, 64, 65, 1000}) {
    const EvalReader reader(dataset, length);
    std::vector<std::pair<uint64_t, uint64_t>> seen;
    uint64_t targets = 0;
    for (int64_t i = 0; i < reader.batches(); ++i) {
      const PackedBatch batch = reader.batch(i);
      ASSERT_GT(batch.ids.size(), 0u);
      ASSERT_LE(batch.ids.size(), static_cast<size_t>(length));
      for (size_t p = 0; p < batch.pieces.size(); ++p) {
        const uint64_t document = batch.pieces[p].document;
        EXPECT_EQ(batch.pieces[p].offset % static_cast<uint64_t>(length), 0u);
        for (int64_t t = batch.cu_seqlens[p]; t < batch.cu_seqlens[p + 1]; ++t) {
          const uint64_t k = batch.pieces[p].offset + static_cast<uint64_t>(t - batch.cu_seqlens[p]);
          seen.emplace_back(document, k);
          const bool last = k + 1 == lengths[document];
          ASSERT_EQ(batch.ids[t], small_token(document, k));
          ASSERT_EQ(batch.targets[t], last ? kNoTarget : small_token(document, k + 1));
          targets += !last;
        }
      }
    }
    EXPECT_EQ(seen.size(), dataset->tokens());
    EXPECT_TRUE(std::ranges::is_sorted(seen));
    EXPECT_EQ(targets, reader.targets());
    EXPECT_EQ(reader.text_bytes(), dataset->text_bytes());
  }
  const EvalReader reader(dataset, 8);
  expect_error([&] { reader.batch(reader.batches()); }, {"evaluation batch"});
  expect_error([&] { EvalReader(dataset, 0); }, {"windows of 0"});
  expect_error([&] { EvalReader(small_dataset(dir / "e", {0}), 8); }, {"has no tokens"});
}

}  // namespace
}  // namespace godwit::data
