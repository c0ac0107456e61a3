#include "godwit/base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>

#include "godwit/base/check.h"

namespace godwit {
namespace {

namespace fs = std::filesystem;

class FileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    dir_ = fs::path(::testing::TempDir()) / fmt::format("godwit-file-{}", ::getpid());
    fs::create_directories(dir_);
  }
  void TearDown() override { fs::remove_all(dir_); }
  std::string path(const char* name) const { return (dir_ / name).string(); }
  fs::path dir_;
};

TEST_F(FileTest, ReadsBackWhatWasWrittenAndLeavesNothingElse) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{65536}, size_t{65537}}) {
    std::string bytes(size, '\0');
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(i * 7);
    write_file(path("a"), bytes);
    EXPECT_EQ(read_file(path("a")), bytes);
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), fs::directory_iterator()), 1);
}

TEST_F(FileTest, ErrorsNameThePath) {
  EXPECT_THAT([&] { read_file(path("absent")); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("absent: cannot open: No such file")));
  EXPECT_THAT([&] { read_file(dir_.string()); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("is a directory")));
  EXPECT_THAT([&] { write_file(path("no/such/dir"), "x"); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("cannot create")));
}

TEST_F(FileTest, FailedRenameRemovesTheHalf) {
  fs::create_directories(dir_ / "taken" / "inside");  // a directory with content cannot be replaced by a file
  EXPECT_THROW(write_file(path("taken"), "x"), Error);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace godwit
