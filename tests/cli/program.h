// Runs the built program as a user does.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "tests/support/files.h"

extern char** environ;

namespace godwit::test {

struct Outcome {
  int code = 0;  // exit code, or 128 + signal
  std::string out;
  std::string err;

  nlohmann::json json() const { return nlohmann::json::parse(out); }
  int64_t err_lines() const { return std::count(err.begin(), err.end(), '\n'); }
};

// stdin comes from a file, stdout and stderr go to files, so that nothing can block.
inline Outcome run(const std::vector<std::string>& args, const std::string& input = "") {
  const testing::ScratchDir scratch;
  testing::put_file(scratch / "in", input);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  const std::array<std::string, 3> files = {scratch / "in", scratch / "out", scratch / "err"};
  for (int fd = 0; fd < 3; ++fd) {
    posix_spawn_file_actions_addopen(&actions, fd, files[fd].c_str(),
                                     fd == 0 ? O_RDONLY : O_WRONLY | O_CREAT | O_TRUNC, 0600);
  }
  std::vector<std::string> words = {GODWIT_BINARY};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  ::setenv("OMP_NUM_THREADS", "1", /*overwrite=*/1);  // tiny models: threads only wait for each other
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, GODWIT_BINARY, &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  check(error == 0, "{} cannot be run", GODWIT_BINARY);
  int status = 0;
  ::waitpid(pid, &status, 0);
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          .out = read_file(files[1]),
          .err = read_file(files[2])};
}

}  // namespace godwit::test
