#include "godwit/dist/group.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/support/compare.h"
#include "tests/support/ranks.h"

namespace godwit::dist {
namespace {

using test::RankOutcome;
using test::Ranks;
using Clock = std::chrono::steady_clock;

constexpr double kTimeout = 2;  // seconds until a dead or hung rank is noticed, in these tests

TEST(Group, OfOneProcessChangesNothing) {
  Group group;
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  at::Tensor x = at::arange(5);
  group.sum(std::vector<at::Tensor>{x});
  group.max(x);
  group.broadcast(x);
  EXPECT_TRUE(at::equal(x, at::arange(5)));
  EXPECT_EQ(group.broadcast(std::string("text")), "text");
  EXPECT_EQ(group.first("fault"), "fault");
  EXPECT_EQ(group.first(std::nullopt), std::nullopt);
  EXPECT_TRUE(group.any(true));
  const Group::Busy busy(group);
  group.close();
}

// Every collective against what it should give.
TEST(Group, CollectivesWorker) {
  if (!test::is_rank()) GTEST_SKIP() << "started by the next test";
  Group group(launch_from_environment(), at::kCPU, /*timeout_s=*/60);
  const int64_t n = group.size(), me = group.rank();
  // Sums: many dtypes and shapes, an empty one, one above a bucket's size, one that is not contiguous.
  const auto make = [](int64_t rank) {
    const auto r = static_cast<double>(rank + 1);
    return std::vector<at::Tensor>{
        at::full({3, 2}, r, at::kFloat),      at::full({}, r, at::kFloat),
        at::zeros({0}, at::kFloat),           at::arange(7, at::kLong) * (rank + 1),
        at::full({7'000'000}, r, at::kFloat), at::full({4, 3}, r, at::kDouble).t()};
  };
  std::vector<at::Tensor> got = make(me);
  group.sum(got);
  std::vector<at::Tensor> want = make(0);
  for (int64_t r = 1; r < n; ++r) {
    const auto more = make(r);
    for (size_t i = 0; i < want.size(); ++i) want[i] = want[i] + more[i];
  }
  for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << i;

  at::Tensor most = at::tensor({static_cast<float>(me), -static_cast<float>(me)});
  group.max(most);
  EXPECT_TRUE(at::equal(most, at::tensor({static_cast<float>(n - 1), 0.0f})));

  at::Tensor from_last = at::full({4}, me, at::kLong);
  group.broadcast(from_last, n - 1);
  EXPECT_TRUE(at::equal(from_last, at::full({4}, n - 1, at::kLong)));
  EXPECT_EQ(group.broadcast("of rank " + std::to_string(me), 1), "of rank 1");
  EXPECT_EQ(group.broadcast(std::vector<double>{static_cast<double>(me), 0.5}),
            (std::vector<double>{0, 0.5}));
  EXPECT_EQ(group.sum(std::vector<double>{1, static_cast<double>(me)})[0], static_cast<double>(n));
  EXPECT_TRUE(group.any(me == 1));
  EXPECT_FALSE(group.any(false));
  EXPECT_EQ(group.first(std::nullopt), std::nullopt);
  EXPECT_EQ(group.first(me > 0 ? std::optional("fault of " + std::to_string(me)) : std::nullopt),
            "fault of 1");
  group.close();
  EXPECT_EQ(group.size(), 1);
}

TEST(Group, CollectivesAtTwoAndThreeRanks) {
  for (const int size : {2, 3}) test::expect_ranks_succeed("Group.CollectivesWorker", size);
}

// Rank 1 misbehaves as GODWIT_FAULT says while the others wait for it in a sum.
TEST(Group, FaultWorker) {
  if (!test::is_rank()) GTEST_SKIP() << "started by the next tests";
  const std::string fault = std::getenv("GODWIT_FAULT");
  Group group(launch_from_environment(), at::kCPU, kTimeout);
  group.any(false);
  if (group.rank() == 1) {
    if (fault == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
    if (fault == "stop") ::raise(SIGSTOP);
    if (fault == "die") ::raise(SIGKILL);
    if (fault == "busy") {
      const Group::Busy busy(group);
      std::this_thread::sleep_for(std::chrono::duration<double>(2 * kTimeout));
    }
    if (fault == "error") {
      group.fail_all("the data are gone");
      return;
    }
  }
  if (group.rank() == 0 && fault == "die 0") ::raise(SIGKILL);
  if (group.rank() == 0 && fault == "stop 0") ::raise(SIGSTOP);
  group.any(false);
  group.close();
}

void expect_named(const std::string& fault, int guilty, const std::vector<std::string>& parts) {
  const auto begin = Clock::now();
  Ranks ranks("Group.FaultWorker", 3, {{"GODWIT_FAULT", fault}});
  for (const int rank : {0, 1, 2}) {
    if (rank == guilty) continue;
    const RankOutcome o = ranks.wait(rank);
    EXPECT_EQ(o.code, 1) << fault << ", rank " << rank << ":\n" << o.text;
    for (const std::string& part : parts)
      EXPECT_NE(o.text.find(part), std::string::npos)
          << fault << ", rank " << rank << ": no \"" << part << "\" in\n"
          << o.text;
  }
  const std::chrono::duration<double> took = Clock::now() - begin;
  EXPECT_LT(took.count(), 10 * kTimeout) << fault;  // start-up of three processes on a busy machine included
}

TEST(Group, ARankThatDiesHangsStopsOrFailsIsNamed) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  const std::string at = std::string(" (host ") + host + ") ";
  expect_named("die", 1, {"rank 1" + at + "is gone"});
  expect_named("stop", 1, {"rank 1" + at + "is gone: no sign of life"});
  expect_named("hang", 1, {"rank 1" + at + "hangs: the others have waited for it"});
  expect_named("error", 1, {"rank 1" + at + "failed: the data are gone"});
}

TEST(Group, RankZeroIsNamedToo) {
  expect_named("die 0", 0, {"rank 0 (host ", "is gone"});
  expect_named("stop 0", 0, {"rank 0 (host "});
}

TEST(Group, ABusyRankIsWaitedFor) {
  test::expect_ranks_succeed("Group.FaultWorker", 2, {{"GODWIT_FAULT", "busy"}});
}

TEST(Group, ARankThatDoesNotComeIsNamed) {
  testing::expect_error(
      [] {
        Group group({.rank = 0,
                     .size = 2,
                     .local_rank = 0,
                     .host = "127.0.0.1",
                     .port = static_cast<uint16_t>(test::free_port())},
                    at::kCPU, /*timeout_s=*/0.3, /*join_s=*/0.3);
      },
      {"rank 1 of 2 has not come to 127.0.0.1"});
}

}  // namespace
}  // namespace godwit::dist
