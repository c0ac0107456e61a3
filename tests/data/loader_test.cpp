#include "godwit/data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>

#include "godwit/data/permutation.h"
#include "tests/data/small_dataset.h"
#include "tests/support/files.h"

namespace godwit::data {
namespace {

using testing::expect_error;
using testing::ScratchDir;

const std::vector<uint64_t> kLengths{5, 0, 1,  64, 0,  257, 17, 3,
                                     2, 1, 31, 16, 15, 129, 63, 65};  // 669 tokens

LoaderOptions options_for(std::shared_ptr<const TokenDataset> dataset, int64_t length,
                          int64_t sequences = 4) {
  LoaderOptions options{.seed = 7, .sequence_length = length, .batch_sequences = sequences};
  options.mix.push_back({std::move(dataset)});
  return options;
}

bool same(const PackedBatch& a, const PackedBatch& b) {
  return a.ids == b.ids && a.targets == b.targets && a.cu_seqlens == b.cu_seqlens && a.pieces == b.pieces;
}

void append(PackedBatch& all, const PackedBatch& part) {
  const auto base = static_cast<int64_t>(all.ids.size());
  all.ids.insert(all.ids.end(), part.ids.begin(), part.ids.end());
  all.targets.insert(all.targets.end(), part.targets.begin(), part.targets.end());
  for (size_t i = 1; i < part.cu_seqlens.size(); ++i) all.cu_seqlens.push_back(base + part.cu_seqlens[i]);
  all.pieces.insert(all.pieces.end(), part.pieces.begin(), part.pieces.end());
}

// Every token is the one its piece says, every target the next one of the same document or none at its end.
void expect_sound(const PackedBatch& batch, const std::vector<const TokenDataset*>& datasets,
                  int64_t length) {
  ASSERT_EQ(batch.cu_seqlens.size(), batch.pieces.size() + 1);
  ASSERT_EQ(batch.cu_seqlens.front(), 0);
  ASSERT_EQ(batch.cu_seqlens.back(), static_cast<int64_t>(batch.ids.size()));
  ASSERT_EQ(batch.targets.size(), batch.ids.size());
  for (size_t p = 0; p < batch.pieces.size(); ++p) {
    const int64_t begin = batch.cu_seqlens[p], end = batch.cu_seqlens[p + 1];
    ASSERT_LT(begin, end);
    ASSERT_EQ(begin / length, (end - 1) / length) << "a piece across two sequences";
    const Piece& piece = batch.pieces[p];
    const uint64_t tokens = datasets[static_cast<size_t>(piece.entry)]->document_tokens(piece.document);
    for (int64_t t = begin; t < end; ++t) {
      const uint64_t i = piece.offset + static_cast<uint64_t>(t - begin);
      ASSERT_EQ(batch.ids[t], small_token(piece.document, i));
      ASSERT_EQ(batch.targets[t], i + 1 < tokens ? small_token(piece.document, i + 1) : kNoTarget);
    }
  }
}

using Position = std::pair<uint64_t, uint64_t>;  // document, token

std::map<Position, int> count_tokens(const PackedBatch& batch, uint64_t first, uint64_t count) {
  std::map<Position, int> seen;
  for (size_t p = 0; p < batch.pieces.size(); ++p) {
    for (int64_t t = batch.cu_seqlens[p]; t < batch.cu_seqlens[p + 1]; ++t) {
      if (static_cast<uint64_t>(t) < first || static_cast<uint64_t>(t) >= first + count) continue;
      ++seen[{batch.pieces[p].document,
              batch.pieces[p].offset + static_cast<uint64_t>(t - batch.cu_seqlens[p])}];
    }
  }
  return seen;
}

TEST(Permutation, IsOneForEverySizeAndKey) {
  for (const uint64_t n : {1, 2, 3, 4, 5, 16, 17, 63, 64, 65, 257, 1000}) {
    std::set<std::vector<uint64_t>> orders;
    for (uint64_t key = 0; key < 3; ++key) {
      const Permutation permutation(n, key);
      std::vector<uint64_t> order;
      for (uint64_t i = 0; i < n; ++i) order.push_back(permutation(i));
      orders.insert(order);
      std::ranges::sort(order);
      for (uint64_t i = 0; i < n; ++i) ASSERT_EQ(order[i], i);
    }
    if (n > 16) {
      EXPECT_EQ(orders.size(), 3u);
    }
  }
}

TEST(Mixture, ClosedFormEqualsCounting) {
  const std::vector<std::vector<double>> cases{{1}, {1, 1}, {0.7, 0.2, 0.1}, {5, 1e-3, 3, 2}};
  for (const auto& weights : cases) {
    const Mixture mixture(weights, 11);
    std::vector<uint64_t> counts(weights.size());
    double total = 0;
    for (const double w : weights) total += w;
    for (uint64_t n = 0; n < 5000; ++n) {
      for (size_t s = 0; s < weights.size(); ++s) {
        ASSERT_EQ(mixture.count(s, n), counts[s]);
        ASSERT_NEAR(static_cast<double>(counts[s]), static_cast<double>(n) * weights[s] / total, 3.0);
      }
      const auto choice = mixture.at(n);
      ASSERT_EQ(choice.index, counts[choice.stream]++);
    }
  }
  expect_error([] { Mixture(std::vector<double>{1, 0}, 0); }, {"weight 0"});
  expect_error([] { Mixture({}, 0); }, {"without data"});
}

TEST(PackedLoader, TokensTargetsAndBoundaries) {
  const ScratchDir dir;
  const auto dataset = small_dataset(dir / "d", kLengths);
  for (const Packing packing : {Packing::kConcatenate, Packing::kWholeWindows}) {
    for (const int64_t length : {1, 15, 16, 17, 63, 64, 65, 257, 669, 2000}) {
      auto options = options_for(dataset, length);
      options.packing = packing;
      const PackedLoader loader(options);
      for (int64_t step = 0; step < 6; ++step) {
        const PackedBatch batch = loader.batch(step);
        ASSERT_EQ(batch.ids.size(), static_cast<size_t>(4 * length));
        expect_sound(batch, {dataset.get()}, length);
      }
    }
  }
}

TEST(PackedLoader, RandomAccessEqualsSequential) {
  const ScratchDir dir;
  const auto dataset = small_dataset(dir / "d", kLengths);
  const PackedLoader first(options_for(dataset, 33));
  std::vector<PackedBatch> batches;
  for (int64_t step = 0; step < 40; ++step) batches.push_back(first.batch(step));  // eight epochs
  const PackedLoader second(options_for(small_dataset(dir / "again", kLengths), 33));
  for (const int64_t step : {39, 3, 17, 3, 0, 38, 1})
    EXPECT_TRUE(same(second.batch(step), batches[step])) << step;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t step = 0; step < 40; ++step)
        EXPECT_TRUE(same(second.batch((step * 7 + t) % 40), batches[(step * 7 + t) % 40]));
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(PackedLoader, SeedAndStageChangeTheOrder) {
  const ScratchDir dir;
  auto options = options_for(small_dataset(dir / "d", kLengths), 33);
  const PackedBatch base = PackedLoader(options).batch(0);
  options.seed = 8;
  EXPECT_FALSE(same(PackedLoader(options).batch(0), base));
  options.seed = 7;
  options.stage = 1;
  EXPECT_FALSE(same(PackedLoader(options).batch(0), base));
}

TEST(PackedLoader, RanksTogetherAreTheBatch) {
  const ScratchDir dir;
  const PackedLoader loader(options_for(small_dataset(dir / "d", kLengths), 17, /*sequences=*/12));
  for (int64_t step = 0; step < 5; ++step) {
    const PackedBatch whole = loader.batch(step);
    for (const int64_t world : {1, 2, 3, 4, 6, 12}) {
      PackedBatch joined;
      for (int64_t rank = 0; rank < world; ++rank) append(joined, loader.batch(step, rank, world));
      EXPECT_TRUE(same(joined, whole)) << world;
    }
  }
  expect_error([&] { loader.batch(0, 0, 5); }, {"12 sequences cannot be shared by 5 ranks"});
  expect_error([&] { loader.batch(0, 2, 2); }, {"rank 2"});
  expect_error([&] { loader.batch(-1); }, {"step -1"});
}

TEST(PackedLoader, AnEpochHoldsEveryTokenOnce) {
  const ScratchDir dir;
  const auto dataset = small_dataset(dir / "d", kLengths);
  const PackedLoader loader(options_for(dataset, 16, /*sequences=*/1));
  PackedBatch all;
  for (int64_t n = 0; n < 3 * 669 / 16 + 1; ++n) append(all, loader.batch(n));
  std::set<std::vector<uint64_t>> orders;
  for (uint64_t epoch = 0; epoch < 3; ++epoch) {
    const auto seen = count_tokens(all, epoch * 669, 669);
    EXPECT_EQ(seen.size(), 669u);
    for (const auto& [position, times] : seen)
      ASSERT_EQ(times, 1) << position.first << ' ' << position.second;
    std::vector<uint64_t> order;
    for (size_t p = 0; p < all.pieces.size(); ++p) {
      if (static_cast<uint64_t>(all.cu_seqlens[p]) / 669 == epoch) order.push_back(all.pieces[p].document);
    }
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 3u);  // shuffled anew
  EXPECT_DOUBLE_EQ(loader.epochs(0, 669), 16.0);
}

TEST(PackedLoader, WholeWindowsGiveLongDocumentsAlone) {
  const ScratchDir dir;
  const auto dataset = small_dataset(
      dir / "d", {640, 100, 7, 129, 64, 3, 63, 16 * 64 - 1006 + 6});  // the rest fills 64s: 1006+24
  const uint64_t windows = 10 + 1 + 2 + 1;
  auto options = options_for(dataset, 64, /*sequences=*/1);
  options.packing = Packing::kWholeWindows;
  const PackedLoader loader(options);
  std::map<Position, int> starts;
  uint64_t alone = 0, n = 0;
  for (; alone < windows; ++n) {
    const PackedBatch batch = loader.sequence(n);
    if (batch.pieces.size() > 1) continue;
    ++alone;
    EXPECT_EQ(batch.pieces[0].offset % 64, 0u);
    ++starts[{batch.pieces[0].document, batch.pieces[0].offset}];
  }
  EXPECT_EQ(starts.size(), windows);  // one epoch of them: each once
  EXPECT_NEAR(static_cast<double>(n), static_cast<double>(dataset->tokens()) / 64, 2.0);
}

TEST(PackedLoader, MinimumLengthLeavesShortDocumentsOut) {
  const ScratchDir dir;
  auto options = options_for(small_dataset(dir / "d", kLengths), 50, /*sequences=*/30);
  options.mix[0].min_document_tokens = 64;
  for (const auto& piece : PackedLoader(options).batch(0).pieces) EXPECT_GE(kLengths[piece.document], 64u);
  options.mix[0].min_document_tokens = 258;
  expect_error([&] { PackedLoader{options}; }, {"no document of 258 tokens or more"});
}

TEST(PackedLoader, MixKeepsTheSharesAndEachStream) {
  const ScratchDir dir;
  const auto a = small_dataset(dir / "a", kLengths);
  const auto b = small_dataset(dir / "b", {300, 40});
  auto options = options_for(a, 32, /*sequences=*/10);
  options.mix[0].weight = 3;
  options.mix.push_back({b, 1});
  const PackedLoader loader(options);
  PackedBatch only_a;
  int64_t from_b = 0;
  for (uint64_t n = 0; n < 200; ++n) {
    const PackedBatch sequence = loader.sequence(n);
    expect_sound(sequence, {a.get(), b.get()}, 32);
    const bool is_b = sequence.pieces[0].entry == 1;
    for (const auto& piece : sequence.pieces) ASSERT_EQ(piece.entry == 1, is_b);
    from_b += is_b;
    if (!is_b) append(only_a, sequence);
  }
  EXPECT_NEAR(static_cast<double>(from_b), 50.0, 1.0);
  const PackedLoader alone(options_for(a, 32, /*sequences=*/1));  // the order of a does not depend on the mix
  PackedBatch expected;
  for (uint64_t n = 0; n < only_a.ids.size() / 32; ++n) append(expected, alone.sequence(n));
  EXPECT_TRUE(same(only_a, expected));
}

TEST(PackedLoader, ALaterStageGoesOnWhereTheEarlierStopped) {
  const ScratchDir dir;
  const auto a = small_dataset(dir / "a", kLengths);
  const auto b = small_dataset(dir / "b", {300, 40, 55});
  auto options = options_for(a, 16, /*sequences=*/3);
  options.mix.push_back({b, 0.4});
  const PackedLoader first(options);
  std::vector<PackedBatch> streams(2);
  const auto collect = [&](const PackedLoader& loader, int64_t steps) {
    for (uint64_t n = 0; n < static_cast<uint64_t>(steps * loader.options().batch_sequences); ++n) {
      const PackedBatch sequence = loader.sequence(n);
      append(streams[sequence.pieces[0].entry], sequence);
    }
  };
  collect(first, 5);
  options.stage = 1;
  options.sequence_length = 40;
  options.mix[0].continues = first.continuation(0, 5);
  options.mix[1].continues = first.continuation(1, 5);
  const PackedLoader second(options);
  collect(second, 2);
  options.stage = 2;
  options.sequence_length = 64;
  options.mix[0].continues = second.continuation(0, 2);
  options.mix[1].continues = second.continuation(1, 2);
  collect(PackedLoader(options), 6);
  for (const size_t e : {0, 1}) {  // the stages together read one stream: every token of the first epoch once
    const uint64_t tokens = options.mix[e].dataset->tokens();
    ASSERT_GE(streams[e].ids.size(), tokens);
    EXPECT_EQ(count_tokens(streams[e], 0, tokens).size(), tokens);
  }
  options.packing = Packing::kWholeWindows;
  expect_error([&] { PackedLoader{options}; }, {"only concatenated data"});
}

TEST(PackedLoader, RefusesWrongOptions) {
  const ScratchDir dir;
  const auto dataset = small_dataset(dir / "d", kLengths);
  expect_error([&] { PackedLoader(options_for(dataset, 0)); }, {"sequences of 0 tokens"});
  expect_error([&] { PackedLoader(options_for(dataset, 4, 0)); }, {"batches of 0 sequences"});
  expect_error([&] { PackedLoader(options_for(small_dataset(dir / "e", {0, 0}), 4)); }, {"has no tokens"});
  auto options = options_for(dataset, 4);
  options.mix.clear();
  expect_error([&] { PackedLoader{options}; }, {"without data"});
  small_dataset(dir / "f", kLengths);
  Manifest other = read_manifest(dir / "f");
  other.tokenizer_hash = "other";
  write_manifest(dir / "f", other);
  options = options_for(dataset, 4);
  options.mix.push_back({std::make_shared<const TokenDataset>(dir / "f")});
  expect_error([&] { PackedLoader{options}; }, {"different tokenizers"});
  EXPECT_EQ(sequences_in_batch(1 << 20, 8192), 128);
  expect_error([] { sequences_in_batch(100, 64); }, {"100 tokens is no whole number of sequences of 64"});
}

}  // namespace
}  // namespace godwit::data
