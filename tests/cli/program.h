// Runs the built program as a user does.
#pragma once

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
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

// A running program. stdin comes from a file, stdout and stderr go to files, so that nothing can block. It is
// killed with the object, if it still runs.
class Process {
 public:
  explicit Process(const std::vector<std::string>& args, const std::string& input = "",
                   const std::map<std::string, std::string>& variables = {}) {
    testing::put_file(scratch_ / "in", input);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    for (int fd = 0; fd < 3; ++fd) {
      posix_spawn_file_actions_addopen(&actions, fd, file(fd).c_str(),
                                       fd == 0 ? O_RDONLY : O_WRONLY | O_CREAT | O_TRUNC, 0600);
    }
    std::vector<std::string> words = {GODWIT_BINARY};
    words.insert(words.end(), args.begin(), args.end());
    std::vector<std::string> lines;
    for (char** line = environ; *line != nullptr; ++line) {
      const std::string text = *line;
      if (!variables.contains(text.substr(0, text.find('=')))) lines.push_back(text);
    }
    for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
    lines.push_back("OMP_NUM_THREADS=1");  // tiny models: threads only wait for each other
    std::vector<char*> argv = pointers(words), envp = pointers(lines);
    const int error = ::posix_spawn(&pid_, GODWIT_BINARY, &actions, nullptr, argv.data(), envp.data());
    posix_spawn_file_actions_destroy(&actions);
    check(error == 0, "{} cannot be run", GODWIT_BINARY);
  }
  ~Process() {
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void send(int signal) const {
    if (pid_ != 0) ::kill(pid_, signal);
  }
  // False: it has ended.
  bool running() {
    if (!status_ && ::waitpid(pid_, &raw_, WNOHANG) == pid_) status_ = raw_;
    return !status_;
  }
  Outcome wait() {
    if (!status_) {
      ::waitpid(pid_, &raw_, 0);
      status_ = raw_;
    }
    pid_ = 0;
    return {.code = WIFEXITED(*status_) ? WEXITSTATUS(*status_) : 128 + WTERMSIG(*status_),
            .out = read_file(file(1)),
            .err = read_file(file(2))};
  }
  // Waits for it to end; none, if it still runs after that long.
  std::optional<Outcome> wait_for(double seconds) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (running() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return running() ? std::nullopt : std::optional(wait());
  }

 private:
  std::string file(int fd) const { return scratch_ / std::array{"in", "out", "err"}[fd]; }
  static std::vector<char*> pointers(std::vector<std::string>& words) {
    std::vector<char*> out;
    for (std::string& word : words) out.push_back(word.data());
    out.push_back(nullptr);
    return out;
  }

  testing::ScratchDir scratch_;
  pid_t pid_ = 0;
  int raw_ = 0;
  std::optional<int> status_;  // once it has ended
};

inline Outcome run(const std::vector<std::string>& args, const std::string& input = "") {
  return Process(args, input).wait();
}

}  // namespace godwit::test
