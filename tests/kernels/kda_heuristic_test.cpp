// The cut of KDA sequences into chunks and segments: pure arithmetic, checked without a GPU.
#include "godwit/kernels/kda_heuristic.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace godwit::kernels::cuda {
namespace {

TEST(KdaHeuristic, SegmentsAreWholeChunksAndBounded) {
  for (int heads : {1, 2, 3, 12, 24, 48, 49, 64, 96, 200})
    for (int64_t length :
         {0L, 1L, 15L, 16L, 17L, 2047L, 2048L, 4097L, 8192L, 65536L, 262144L, 1048576L, 5000000L}) {
      const int64_t segment = kda_segment_length(length, heads);
      EXPECT_EQ(segment % kKdaChunk, 0) << heads << " " << length;
      EXPECT_GT(segment, 0);
      if (segment >= length) continue;
      EXPECT_GE(segment, kda_base_segment(heads));
      EXPECT_LE((length + segment - 1) / segment, kda_max_segments(heads));
      EXPECT_GE((length + segment - 1) / segment, kKdaMinSplit);
    }
}

TEST(KdaHeuristic, ManyHeadsAndShortSequencesAreNotCut) {
  EXPECT_GE(kda_segment_length(1 << 20, 96), 1 << 20);
  EXPECT_GE(kda_segment_length(1024, 1), 1024);
  EXPECT_EQ(kda_segment_length(8192, 12), 1024);
  EXPECT_EQ(kda_segment_length(1 << 20, 12), 1 << 15);
}

// The cut is a function of the sequence's own length and H: nothing else can enter. What must hold besides:
// numbers of different sequences never meet, whatever the lengths, and stay below the count that grids and
// workspaces are made for.
TEST(KdaHeuristic, UnitNumbersAreDisjoint) {
  std::mt19937 rng(7);
  for (int round = 0; round < 200; ++round) {
    const int heads = 1 + int(rng() % 48), sequences = 1 + int(rng() % 20);
    std::vector<int64_t> cu = {0};
    int64_t longest = 0;
    for (int n = 0; n < sequences; ++n) {
      const int64_t length = rng() % 3 == 0 ? rng() % 40 : rng() % 30000;
      longest = length > longest ? length : longest;
      cu.push_back(cu.back() + length);
    }
    for (int unit : {kKdaChunk, kda_base_segment(heads)}) {
      int64_t next = 0;
      for (int n = 0; n < sequences; ++n) {
        const int64_t length = cu[n + 1] - cu[n], first = kda_first_unit(cu[n], n, unit);
        const int64_t size = unit == kKdaChunk ? kKdaChunk : kda_segment_length(length, heads);
        const int64_t used = length == 0 ? 1 : (length + size - 1) / size;
        EXPECT_GE(first, next);
        next = first + used;
      }
      EXPECT_LE(next, kda_unit_count(cu.back(), sequences, unit));
    }
    const int64_t units = kda_segment_units(cu.back(), sequences, longest, heads);
    EXPECT_TRUE(units == sequences || units == kda_unit_count(cu.back(), sequences, kda_base_segment(heads)));
    if (kda_segment_length(longest, heads) < longest) {
      EXPECT_GT(units, sequences);
    }
  }
}

}  // namespace
}  // namespace godwit::kernels::cuda
