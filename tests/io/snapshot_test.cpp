#include "godwit/io/snapshot.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "godwit/base/log.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;

using Steps = std::vector<int64_t>;

void write_snapshot(const fs::path& root, int64_t step, size_t bytes = 1000) {
  SnapshotWriter writer(root, step);
  put_file(writer.directory() / "state", std::string(bytes, static_cast<char>('a' + step % 26)));
  fs::create_directory(writer.directory() / "model");
  put_file(writer.directory() / "model/w", fmt::format("weights of {}", step));
  writer.commit();
}

class SnapshotTest : public ::testing::Test {
 protected:
  // Damaged snapshots are expected here; their warnings would only be noise.
  void SetUp() override { set_log_level(LogLevel::kError); }
  void TearDown() override { set_log_level(LogLevel::kInfo); }
  ScratchDir root_;
};

TEST_F(SnapshotTest, AppearsAtCommitAndVerifies) {
  EXPECT_EQ(latest_valid_snapshot(root_ / "absent"), std::nullopt);
  EXPECT_EQ(latest_valid_snapshot(root_.path()), std::nullopt);
  {
    SnapshotWriter writer(root_.path(), 5);
    put_file(writer.directory() / "state", "x");
    EXPECT_EQ(writer.directory(), root_ / "step-5.tmp");
    EXPECT_EQ(list_snapshots(root_.path()), Steps{});
  }
  EXPECT_EQ(root_.entries(), 0);
  for (const int64_t step : {0, 5, 10, 100}) write_snapshot(root_.path(), step);
  put_file(root_ / "step-7", "a file");
  fs::create_directory(root_ / "step-007");
  fs::create_directory(root_ / "step-8.tmp");
  EXPECT_EQ(list_snapshots(root_.path()), (Steps{0, 5, 10, 100}));
  EXPECT_EQ(latest_valid_snapshot(root_.path()), 100);
  EXPECT_EQ(read_file(snapshot_path(root_.path(), 100) / "model/w"), "weights of 100");
  write_snapshot(root_.path(), 101);
  EXPECT_FALSE(fs::exists(root_ / "step-8.tmp"));  // what an interrupted writer left
}

TEST_F(SnapshotTest, EveryDamageIsFoundAndNamed) {
  write_snapshot(root_.path(), 1);
  write_snapshot(root_.path(), 2);
  const fs::path two = root_ / "step-2";
  const auto expect = [&](SnapshotCheck how, std::initializer_list<std::string> parts) {
    expect_error([&] { verify_snapshot(two, how); }, parts);
    EXPECT_EQ(latest_valid_snapshot(root_.path(), how), 1);
    write_snapshot(root_.path(), 2);  // replaces the damaged one
    verify_snapshot(two, SnapshotCheck::kChecksums);
  };
  put_file(two / "state", std::string(999, 'c'));
  expect(SnapshotCheck::kSizes, {"step-2/state has 999 bytes, expected 1000"});
  put_file(two / "state", std::string(999, 'c') + "d");
  verify_snapshot(two, SnapshotCheck::kSizes);
  expect(SnapshotCheck::kChecksums, {"step-2/state is damaged: checksum"});
  fs::remove(two / "model/w");
  expect(SnapshotCheck::kSizes, {"step-2/model/w: No such file"});
  fs::remove(two / "snapshot.json");
  expect(SnapshotCheck::kSizes, {"step-2/snapshot.json", "No such file"});
  put_file(two / "snapshot.json", "{}");
  expect(SnapshotCheck::kSizes, {"step-2/snapshot.json", "not a list of files"});
  put_file(two / "snapshot.json", "{\"format\": ");
  expect(SnapshotCheck::kSizes, {"step-2/snapshot.json", "not valid JSON"});
  put_file(two / "snapshot.json", read_file(root_ / "step-1/snapshot.json"));
  expect(SnapshotCheck::kSizes, {"step-2/snapshot.json: it is of step 1"});
  std::string list = read_file(two / "snapshot.json");
  list.replace(list.find("\"state\""), 7, "\"../x\"");
  put_file(two / "snapshot.json", list);
  expect(SnapshotCheck::kSizes, {"a file outside the snapshot: \"../x\""});
}

TEST_F(SnapshotTest, PruneKeepsTheNewestValidOnes) {
  for (int64_t step = 1; step <= 6; ++step) write_snapshot(root_.path(), step);
  put_file(root_ / "step-5/state", "short");
  EXPECT_EQ(prune_snapshots(root_.path(), 10), Steps{});
  EXPECT_EQ(prune_snapshots(root_.path(), 3),
            (Steps{2, 1}));  // 6, 4 and 3 are valid; 5 is left for its owner to look at
  EXPECT_EQ(list_snapshots(root_.path()), (Steps{3, 4, 5, 6}));
  put_file(root_ / "step-6/state", std::string(1000, 'x'));  // same size, other content
  EXPECT_EQ(prune_snapshots(root_.path(), 1), Steps{});      // the newest does not verify: nothing goes
  write_snapshot(root_.path(), 7);
  EXPECT_EQ(prune_snapshots(root_.path(), 1), (Steps{6, 5, 4, 3}));
  EXPECT_EQ(list_snapshots(root_.path()), Steps{7});
  EXPECT_EQ(root_.entries(), 1);
  expect_error([&] { prune_snapshots(root_.path(), 0); }, {"0 snapshots to keep"});
}

TEST_F(SnapshotTest, FullDiskLeavesTheOlderOnes) {
  const testing::SmallDisk disk(128);
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small file system needs root";
  write_snapshot(disk.path(), 1, 20'000);
  write_snapshot(disk.path(), 2, 20'000);
  expect_error(
      [&] {
        SnapshotWriter writer(disk.path(), 3);
        write_file_atomic(writer.directory() / "state", std::string(200'000, 'x'));
        writer.commit();
      },
      {"step-3.tmp/state", "No space left"});
  EXPECT_EQ(list_snapshots(disk.path()), (Steps{1, 2}));
  EXPECT_EQ(latest_valid_snapshot(disk.path()), 2);
  write_snapshot(disk.path(), 4, 20'000);  // the failed one gave its space back
  EXPECT_EQ(latest_valid_snapshot(disk.path()), 4);
}

TEST_F(SnapshotTest, WriterThatDiesInTheMiddle) {
  write_snapshot(root_.path(), 1);
  const pid_t child = ::fork();
  if (child == 0) {
    SnapshotWriter writer(root_.path(), 2);
    put_file(writer.directory() / "state", "half");
    ::_exit(0);  // no destructor runs
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(fs::exists(root_ / "step-2.tmp"));
  EXPECT_EQ(list_snapshots(root_.path()), Steps{1});
  EXPECT_EQ(latest_valid_snapshot(root_.path()), 1);
  write_snapshot(root_.path(), 2);
  EXPECT_EQ(latest_valid_snapshot(root_.path()), 2);
  EXPECT_EQ(root_.entries(), 2);
}

// Killed at any moment of writing, replacing and pruning: what is named step-N is whole, and the newest is at
// most one step behind.
TEST_F(SnapshotTest, WriterKilledAtAnyMoment) {
  for (int trial = 0; trial < 12; ++trial) {
    const ScratchDir root;
    int report[2];
    ASSERT_EQ(::pipe(report), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      for (int64_t step = 1;; ++step) {
        write_snapshot(root.path(), step, 50'000);
        if (::write(report[1], &step, sizeof step) != sizeof step) ::_exit(1);
        if (step % 3 == 0) write_snapshot(root.path(), step, 60'000);
        prune_snapshots(root.path(), 2);
      }
    }
    int64_t step = 0;
    ASSERT_EQ(::read(report[0], &step, sizeof step),
              static_cast<ssize_t>(sizeof step));  // the first one is done
    ::usleep(static_cast<useconds_t>(1000 + 2700 * trial));
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ::close(report[1]);
    for (int64_t next; ::read(report[0], &next, sizeof next) == static_cast<ssize_t>(sizeof next);)
      step = next;
    ::close(report[0]);
    for (const int64_t listed : list_snapshots(root.path())) {
      EXPECT_NO_THROW(verify_snapshot(snapshot_path(root.path(), listed), SnapshotCheck::kChecksums));
    }
    const auto latest = latest_valid_snapshot(root.path());
    ASSERT_TRUE(latest.has_value());
    EXPECT_GE(*latest, step);
    EXPECT_LE(*latest, step + 1);
  }
}

}  // namespace
}  // namespace godwit::io
