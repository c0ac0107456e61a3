#include "godwit/io/file.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "godwit/io/checksum.h"
#include "tests/support/files.h"

namespace godwit::io {
namespace {

using testing::expect_error;
using testing::put_file;
using testing::ScratchDir;
using testing::SmallDisk;

TEST(AtomicFile, AppearsAtCommitOnly) {
  const ScratchDir dir;
  const fs::path path = dir / "a.bin";
  {
    AtomicFile file(path);
    file.append("half");
    EXPECT_FALSE(fs::exists(path));
  }
  EXPECT_EQ(dir.entries(), 0);  // not committed: nothing stays
  AtomicFile file(path);
  file.append("whole");
  file.commit();
  EXPECT_EQ(read_file(path), "whole");
  EXPECT_EQ(dir.entries(), 1);
}

TEST(AtomicFile, PiecesOfEverySizeAndPlace) {
  const ScratchDir dir;
  std::string expected;
  AtomicFile file(dir / "x");
  for (const size_t size : {0, 1, 4095, 1 << 20, 3, (1 << 20) + 1, 17}) {
    const std::string piece(size, static_cast<char>('a' + size % 26));
    file.append(piece);
    expected += piece;
    EXPECT_EQ(file.size(), expected.size());
  }
  file.write_at(2, as_bytes("HERE"));
  expected.replace(2, 4, "HERE");
  file.append("tail");
  expected += "tail";
  file.commit();
  EXPECT_EQ(read_file(dir / "x"), expected);
}

TEST(AtomicFile, ReplacesWhileAMapKeepsTheOldContent) {
  const ScratchDir dir;
  write_file_atomic(dir / "x", std::string_view("old"));
  const MappedFile map(dir / "x");
  write_file_atomic(dir / "x", std::string_view("new"));
  EXPECT_EQ(as_text(map.bytes()), "old");
  EXPECT_EQ(read_file(dir / "x"), "new");
}

TEST(AtomicFile, KilledWriterLeavesTheFinalNameAlone) {
  const ScratchDir dir;
  write_file_atomic(dir / "x", std::string_view("old"));
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicFile file(dir / "x");
    file.append(std::string(3 << 20, 'n'));
    ::_exit(0);  // in the middle: no destructor runs
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(read_file(dir / "x"), "old");
}

TEST(AtomicFile, ErrorsNameThePathAndTheReason) {
  const ScratchDir dir;
  expect_error([&] { AtomicFile(dir / "no/such/dir/x"); }, {"no/such/dir/x", "No such file"});
  expect_error([&] { AtomicFile("/"); }, {"not a name"});
  expect_error([&] { read_file(dir / "absent"); }, {"absent", "No such file"});
  expect_error([&] { MappedFile(dir / "absent"); }, {"absent", "No such file"});
  expect_error([&] { MappedFile(dir.path()); }, {"not a regular file"});
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  expect_error([&] { MappedFile(dir / "pipe"); },
               {"pipe", "not a regular file"});  // and does not wait for a writer
  expect_error([&] { read_file(dir.path()); }, {dir.path().string(), "directory"});
}

// In a child, because the limit also binds everything else the process writes.
// As root, `--out /dev/null` would leave a plain file in its place.
TEST(AtomicFile, TakesThePlaceOfPlainFilesOnly) {
  const ScratchDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  expect_error([&] { write_file_atomic(dir / "pipe", "x"); }, {"pipe", "not a regular file"});
  expect_error([&] { write_file_atomic(dir / "", "x"); }, {"it is a directory"});
  EXPECT_TRUE(fs::is_fifo(dir / "pipe"));
  EXPECT_EQ(dir.entries(), 1);
}

TEST(AtomicFile, FailedWriteNamesThePathAndLeavesNothing) {
  const ScratchDir dir;
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int code = 1;
    try {
      AtomicFile file(dir / "big");
      file.append(std::string(5000, 'x'));
      file.commit();
    } catch (const Error& error) {
      const std::string text = error.what();
      const bool named =
          text.find("/big: ") != std::string::npos && text.find("File too large") != std::string::npos;
      code = named && !fs::exists(dir / "big") && dir.entries() == 0 ? 0 : 2;
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(AtomicFile, FullDiskNamesThePath) {
  const SmallDisk disk(64);
  if (!disk.mounted()) GTEST_SKIP() << "mounting a small file system needs root";
  write_file_atomic(disk.path() / "old", std::string_view("kept"));
  const fs::path path = disk.path() / "new";
  expect_error([&] { write_file_atomic(path, std::string(1 << 20, 'x')); }, {path.string(), "No space left"});
  expect_error([&] { AtomicFile(path).reserve(1 << 20); }, {path.string(), "No space left", "1048576"});
  EXPECT_FALSE(fs::exists(path));
  EXPECT_EQ(read_file(disk.path() / "old"), "kept");
  write_file_atomic(path, std::string(32 << 10, 'x'));  // the failed attempts gave their space back
}

TEST(MappedFile, ForgottenPagesComeBack) {
  const ScratchDir dir;
  std::string text(100'000, 'a');
  for (size_t i = 0; i < text.size(); i += 97) text[i] = static_cast<char>(i);
  put_file(dir / "x", text);
  const MappedFile map(dir / "x", MappedFile::Mode::kCopyOnWrite);
  for (const auto& [begin, size] :
       {std::pair<size_t, size_t>{0, 100'000}, {5, 50'000}, {99'999, 1}, {4096, 4096}, {7, 0}}) {
    EXPECT_EQ(as_text(map.bytes()), text);
    map.forget(map.bytes().subspan(begin, size));
  }
  EXPECT_EQ(as_text(map.bytes()), text);
}

TEST(MappedFile, CopyOnWriteNeverReachesTheFile) {
  const ScratchDir dir;
  write_file_atomic(dir / "x", std::string_view("abc"));
  const MappedFile map(dir / "x", MappedFile::Mode::kCopyOnWrite);
  *const_cast<std::byte*>(map.bytes().data()) = std::byte{'Z'};
  EXPECT_EQ(as_text(map.bytes()), "Zbc");
  EXPECT_EQ(read_file(dir / "x"), "abc");
  write_file_atomic(dir / "empty", std::string_view());
  EXPECT_EQ(MappedFile(dir / "empty").size(), 0u);
  EXPECT_EQ(read_file(dir / "empty"), "");
  EXPECT_FALSE(read_file("/proc/self/status").empty());  // its size is unknown before it is read
}

TEST(AtomicDirectory, AppearsAtCommitOnly) {
  const ScratchDir dir;
  const fs::path path = dir / "parent/run";
  {
    const AtomicDirectory made(path);
    write_file_atomic(made.temporary() / "f", std::string_view("1"));
    EXPECT_FALSE(fs::exists(path));
  }
  EXPECT_TRUE(fs::is_empty(dir / "parent"));
  AtomicDirectory made(path.string() + "/");
  fs::create_directory(made.temporary() / "sub");
  write_file_atomic(made.temporary() / "sub/f", std::string_view("1"));
  made.commit();
  EXPECT_EQ(read_file(path / "sub/f"), "1");
}

TEST(AtomicDirectory, RefusesOrReplacesAnExistingOne) {
  const ScratchDir dir;
  fs::create_directory(dir / "d");
  write_file_atomic(dir / "d/f", std::string_view("old"));
  expect_error([&] { AtomicDirectory(dir / "d"); }, {"/d exists already"});
  {
    AtomicDirectory made(dir / "d", AtomicDirectory::Existing::kReplace);
    write_file_atomic(made.temporary() / "f", std::string_view("new"));
    EXPECT_EQ(read_file(dir / "d/f"), "old");
    made.commit();
    EXPECT_EQ(read_file(dir / "d/f"), "new");
  }
  EXPECT_EQ(dir.entries(), 1);
  AtomicDirectory fresh(dir / "e", AtomicDirectory::Existing::kReplace);
  fresh.commit();
  EXPECT_TRUE(fs::is_directory(dir / "e"));
}

// A child that dies in the middle of writing `path`.
void leave_behind(const fs::path& path) {
  const pid_t child = ::fork();
  if (child == 0) {
    AtomicDirectory made(path);
    write_file_atomic(made.temporary() / "f", std::string_view("half"));
    ::_exit(0);  // no destructor runs
  }
  int status = 0;
  ::waitpid(child, &status, 0);
}

TEST(AtomicDirectory, RemovesWhatKilledWritersLeft) {
  const ScratchDir dir;
  leave_behind(dir / "d");
  leave_behind(dir / "other");
  EXPECT_EQ(dir.entries(), 2);
  put_file(dir / "d.tmp-1-2", "a file of that name is left alone");
  for (const char* name : {"d.tmp-backup", "d.tmp-1-2-3", "d.tmp-1", "d.tmp-1-x", "d.tmp--1"})
    fs::create_directory(dir / name);  // somebody's own
  fs::create_directory(dir / "mine");
  fs::create_directory_symlink("mine", dir / "d.tmp-3-4");
  {
    const AtomicDirectory living(dir / "d");
    AtomicDirectory made(dir / "d");  // a second writer takes only what is dead
    EXPECT_TRUE(fs::is_directory(living.temporary()));
    EXPECT_EQ(dir.entries(), 11);  // two at work, other's remains, the file, five and two of somebody's own
    made.commit();
  }
  EXPECT_EQ(dir.entries(), 10);
  EXPECT_TRUE(fs::is_directory(dir / "d"));
}

TEST(DirectoryLock, OneAtATime) {
  const ScratchDir dir;
  {
    const DirectoryLock first(dir.path());
    expect_error([&] { DirectoryLock{dir.path()}; }, {dir.path().string(), "another process is at work"});
  }
  EXPECT_NO_THROW(DirectoryLock{dir.path()});
}

TEST(AtomicDirectory, RefusesALinkAtTheStart) {
  const ScratchDir dir;
  fs::create_symlink("nowhere", dir / "dangling");
  fs::create_directory(dir / "real");
  fs::create_symlink("real", dir / "link");
  for (const char* name : {"dangling", "link"})
    expect_error([&] { AtomicDirectory(dir / name); }, {name, "is a symbolic link"});
  EXPECT_EQ(dir.entries(), 3);
}

TEST(AtomicDirectory, TheLoserOfARaceIsToldSo) {
  const ScratchDir dir;
  AtomicDirectory first(dir / "d"), second(dir / "d");
  write_file_atomic(first.temporary() / "f", std::string_view("1"));
  first.commit();
  expect_error([&] { second.commit(); }, {"/d exists already: something else has made it in the meantime"});
  EXPECT_EQ(read_file(dir / "d/f"), "1");
}

TEST(Checksum, KnownValuesAndPieces) {
  EXPECT_EQ(hex64(xxh3(std::string_view())), "2d06800538d394c2");  // XXH3_64bits of nothing, seed 0
  const std::string text(100'000, 'q');
  Xxh3 pieces;
  for (size_t begin = 0; begin < text.size(); begin += 777)
    pieces.update(as_bytes(std::string_view(text).substr(begin, 777)));
  EXPECT_EQ(pieces.digest(), xxh3(text));
  const ScratchDir dir;
  write_file_atomic(dir / "x", text);
  EXPECT_EQ(xxh3_file(dir / "x"), xxh3(text));
  EXPECT_EQ(parse_hex64(hex64(0x0123456789abcdef), "x"), 0x0123456789abcdefu);
  for (const char* bad : {"", "12", "0123456789abcdeg", "0123456789abcdef0", "-123456789abcdef"}) {
    expect_error([&] { parse_hex64(bad, "here"); }, {"here: ", "16 hexadecimal"});
  }
}

}  // namespace
}  // namespace godwit::io
