// Tests over several processes. A test program starts itself again, once a rank, with the variables a
// launcher would set and one test to run: the "worker", which is passed over when nobody started it as one.
//
//   TEST(Sum, Worker) { if (!test::is_rank()) GTEST_SKIP(); dist::Group group(...); ... }
//   TEST(Sum, AddsUp) { test::expect_success(test::run_ranks("Sum.Worker", 3)); }
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "tests/support/files.h"

extern char** environ;

namespace godwit::test {

// A port that was free a moment ago.
inline int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  check(::bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0, "no free port");
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(fd);
  return ntohs(address.sin_port);
}

inline std::map<std::string, std::string> rank_variables(int rank, int size, int port) {
  return {{"RANK", std::to_string(rank)},        {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_RANK", std::to_string(rank)},  {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}, {"GLOO_SOCKET_IFNAME", "lo"}};
}

inline bool is_rank() {
  return std::getenv("GODWIT_TEST_RANK") != nullptr;
}

struct RankOutcome {
  int code = -1;  // exit code, or 128 + signal
  std::string text;
};

// The ranks of a test that runs. They are killed with the object.
class Ranks {
 public:
  Ranks(const std::string& worker, int size, const std::map<std::string, std::string>& variables = {}) {
    const int port = free_port();
    for (int rank = 0; rank < size; ++rank) {
      auto all = rank_variables(rank, size, port);
      all.insert(variables.begin(), variables.end());
      all["GODWIT_TEST_RANK"] = "1";
      all["OMP_NUM_THREADS"] = "1";
      start(worker, rank, all);
    }
  }
  ~Ranks() {
    for (const pid_t pid : pids_) {
      if (pid == 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  void send(int rank, int signal) const { ::kill(pids_[rank], signal); }
  RankOutcome wait(int rank) {
    int status = 0;
    ::waitpid(pids_[rank], &status, 0);
    pids_[rank] = 0;
    return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
            .text = read_file(file(rank))};
  }
  std::vector<RankOutcome> wait_all() {
    std::vector<RankOutcome> out;
    for (size_t rank = 0; rank < pids_.size(); ++rank) out.push_back(wait(static_cast<int>(rank)));
    return out;
  }

 private:
  std::string file(int rank) const { return scratch_ / std::to_string(rank); }

  void start(const std::string& worker, int rank, const std::map<std::string, std::string>& variables) {
    std::vector<std::string> words = {std::filesystem::read_symlink("/proc/self/exe").string(),
                                      "--gtest_filter=" + worker};
    std::vector<std::string> lines;
    for (char** line = environ; *line != nullptr; ++line) {
      const std::string text = *line;
      if (!variables.contains(text.substr(0, text.find('=')))) lines.push_back(text);
    }
    for (const auto& [name, value] : variables) lines.push_back(name + "=" + value);
    const auto pointers = [](std::vector<std::string>& strings) {
      std::vector<char*> out;
      for (std::string& s : strings) out.push_back(s.data());
      out.push_back(nullptr);
      return out;
    };
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, file(rank).c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND,
                                     0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t pid = 0;
    std::vector<char*> argv = pointers(words), envp = pointers(lines);
    const int error = ::posix_spawn(&pid, words[0].c_str(), &actions, nullptr, argv.data(), envp.data());
    posix_spawn_file_actions_destroy(&actions);
    check(error == 0, "{} cannot be run", words[0]);
    pids_.push_back(pid);
  }

  testing::ScratchDir scratch_;
  std::vector<pid_t> pids_;
};

// Runs the worker at every rank; all of them must succeed.
inline void expect_ranks_succeed(const std::string& worker, int size,
                                 const std::map<std::string, std::string>& variables = {}) {
  Ranks ranks(worker, size, variables);
  for (int rank = 0; rank < size; ++rank) {
    const RankOutcome o = ranks.wait(rank);
    EXPECT_EQ(o.code, 0) << "rank " << rank << " of " << size << ":\n" << o.text;
    EXPECT_NE(o.text.find("[  PASSED  ] 1 test"), std::string::npos) << o.text;
  }
}

}  // namespace godwit::test
