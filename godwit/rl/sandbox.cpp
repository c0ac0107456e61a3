#include "godwit/rl/sandbox.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/rl/sandbox_child.h"

namespace godwit::rl {
namespace {

namespace fs = std::filesystem;

// User ids for sandboxes that root starts, far above those that systems give out. No two that live share one,
// as the limit on processes counts a user's: a place for each of this process, and so many places for each
// process (those whose ids differ by a multiple of 60,000 share them).
constexpr uid_t kFirstUid = 1'900'000'000, kPlaces = 4096, kProcesses = 60'000;

class Places {
 public:
  uid_t take() {
    const std::lock_guard lock(mutex_);
    const auto free = std::ranges::find(taken_, false);
    check(free != taken_.end(), "sandbox: {} programs live already", kPlaces);
    *free = true;
    return static_cast<uid_t>(free - taken_.begin());
  }
  void give_back(uid_t place) {
    const std::lock_guard lock(mutex_);
    taken_[place] = false;
  }

 private:
  std::mutex mutex_;
  std::vector<bool> taken_ = std::vector<bool>(kPlaces);
};

Places& places() {
  static Places all;
  return all;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int fds[2];
    check(::pipe2(fds, O_CLOEXEC) == 0, "sandbox: no pipe: {}", std::strerror(errno));
    read = fds[0];
    write = fds[1];
  }
  ~Pipe() {
    close(read);
    close(write);
  }
  static void close(int& fd) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  static int take(int& fd) { return std::exchange(fd, -1); }
};

bool put(const std::string& path, const std::string& text) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return false;
  const bool done = ::write(fd, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::close(fd);
  return done;
}

// One user, who is root inside.
bool map_ids(pid_t pid) {
  const std::string proc = "/proc/" + std::to_string(pid);
  return put(proc + "/setgroups", "deny") && put(proc + "/uid_map", fmt::format("0 {} 1\n", ::geteuid())) &&
         put(proc + "/gid_map", fmt::format("0 {} 1\n", ::getegid()));
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> out;
  for (std::string& word : words) out.push_back(word.data());
  out.push_back(nullptr);
  return out;
}

// In namespaces the program is a child of a shell, which tells its end by a code as shells do.
std::string ended_with(int code) {
  if (code <= 128 || code > 128 + 64) return fmt::format("exited with {}", code);
  return fmt::format("was killed by signal {} ({})", code - 128, ::strsignal(code - 128));
}

// Without reaping it: its id stays its own until it is killed for good.
std::string ended(pid_t pid) {
  for (int i = 0; i < 100; ++i) {
    siginfo_t info = {};
    if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid == pid) {
      return ended_with(info.si_code == CLD_EXITED ? info.si_status : 128 + info.si_status);
    }
    ::usleep(10000);
  }
  return "closed its output";
}

}  // namespace

Sandbox::Sandbox(std::vector<std::string> command, const std::string& folder, const SandboxLimits& limits,
                 bool weaker, Isolation best)
    : limits_(limits) {
  check(!command.empty(), "sandbox: no command");
  check(folder.empty() || fs::is_directory(folder), "sandbox: {} is no folder", folder);
  ::signal(SIGPIPE, SIG_IGN);  // a program that has ended must not end us
  try {
    start(command, folder, best);
  } catch (const Error& error) {
    const std::string text = error.what();
    kill_all();
    if (text.find("(program)") != std::string::npos) throw;
    check(weaker,
          "{}. This system does not allow namespaces; `weaker = true` runs the program with limits and a "
          "system call "
          "filter alone, and then it can read what this user can",
          text);
    try {
      start(command, folder, Isolation::kLimits);
    } catch (...) {
      kill_all();
      throw;
    }
  }
}

Sandbox::~Sandbox() {
  kill_all();
}

void Sandbox::kill_all() {
  if (pid_ > 0) {
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
  }
  if (place_) places().give_back(*place_);
  place_.reset();
  Pipe::close(to_);
  Pipe::close(from_);
  if (!root_.empty()) {
    std::error_code ignored;
    fs::remove_all(root_, ignored);
    root_.clear();
  }
}

void Sandbox::start(const std::vector<std::string>& command, const std::string& folder, Isolation isolation) {
  isolation_ = isolation;
  std::string name = (fs::temp_directory_path() / "godwit-sandbox-XXXXXX").string();
  check(::mkdtemp(name.data()) != nullptr, "sandbox: cannot create {}: {}", name, std::strerror(errno));
  root_ = name;
  ChildPlan plan{.command = command, .limits = limits_, .root = root_};
  plan.namespaces = isolation == Isolation::kNamespaces;
  plan.as_root = ::geteuid() == 0;
  place_ = places().take();
  plan.uid = kFirstUid + static_cast<uid_t>(::getpid()) % kProcesses * kPlaces + *place_;
  const uid_t owner = plan.as_root ? plan.uid : 0;
  plan.work_options =
      fmt::format("size={},nr_inodes=10k,mode=700,uid={},gid={}", limits_.work_bytes, owner, owner);
  if (plan.namespaces) {
    plan_mounts(folder, plan);
  } else {
    for (std::string& word : plan.command)
      if (word.starts_with("/program/")) word = folder + word.substr(8);
    if (plan.as_root)
      check(::chown(root_.c_str(), plan.uid, plan.uid) == 0, "sandbox: {}", std::strerror(errno));
  }
  std::vector<std::string> environment = {"PATH=/usr/bin:/bin", "HOME=/work", "LANG=C.UTF-8",
                                          "PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"};
  // The first process of a namespace is deaf to signals it has no handler for, its own aborts included; so
  // that is a shell, and the program its child.
  std::vector<std::string> words = plan.command;
  if (plan.namespaces) words.insert(words.begin(), {"/usr/bin/sh", "-c", "\"$@\"; exit $?", "sh"});
  const std::vector<char*> argv = pointers(words), envp = pointers(environment);
  Pipe in, out, report, go;
  plan.stdin_fd = in.read;
  plan.stdout_fd = out.write;
  plan.report_fd = report.write;
  long flags = SIGCHLD;
  if (plan.namespaces) {
    flags |= CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS;
    if (!plan.as_root) {
      flags |= CLONE_NEWUSER;
      plan.go_fd = go.read;
    }
  }
  const long pid = ::syscall(SYS_clone, flags, nullptr, nullptr, nullptr, nullptr);
  check(pid >= 0, "sandbox: {}", std::strerror(errno));
  if (pid == 0) become_program(plan, argv.data(), envp.data());
  pid_ = static_cast<pid_t>(pid);
  if (plan.go_fd >= 0) {
    check(map_ids(pid_), "sandbox: the user namespace: {}", std::strerror(errno));
    check(::write(go.write, "g", 1) == 1, "sandbox: {}", std::strerror(errno));
  }
  Pipe::close(report.write);
  ChildFailure failure = {};
  ssize_t got = 0;
  do {
    got = ::read(report.read, &failure, sizeof failure);
  } while (got < 0 && errno == EINTR);
  check(got == 0, "sandbox: {} cannot be started: {} ({})", command.front(), std::strerror(failure.error),
        got > 0 ? failure.step : "report");
  to_ = Pipe::take(in.write);
  from_ = Pipe::take(out.read);
  ::fcntl(to_, F_SETFL, O_NONBLOCK);
  ::fcntl(from_, F_SETFL, O_NONBLOCK);
}

Sandbox::Answer Sandbox::read_line(double deadline, std::string& answer) {
  for (;;) {
    const size_t newline = pending_.find('\n');
    if (newline != std::string::npos) {
      answer = pending_.substr(0, newline);
      pending_.erase(0, newline + 1);
      return Answer::kLine;
    }
    if (static_cast<int64_t>(pending_.size()) > limits_.line_bytes) return Answer::kFlood;
    const double left = deadline - now();
    if (left <= 0) return Answer::kTimeout;
    pollfd wait = {.fd = from_, .events = POLLIN, .revents = 0};
    const int ready = ::poll(&wait, 1, std::min(1000, static_cast<int>(left * 1000) + 1));
    if (ready <= 0) continue;
    char buffer[65536];
    const ssize_t got = ::read(from_, buffer, sizeof buffer);
    if (got > 0) pending_.append(buffer, static_cast<size_t>(got));
    if (got == 0) return Answer::kEnded;
    if (got < 0 && errno != EAGAIN && errno != EINTR) return Answer::kEnded;
  }
}

Sandbox::Answer Sandbox::ask(std::string_view line, double timeout_s, std::string& answer) {
  if (pid_ <= 0) return Answer::kEnded;
  const double deadline = now() + timeout_s;
  std::string text(line);
  text += '\n';
  Answer result = Answer::kLine;
  for (std::string_view rest = text; !rest.empty() && result == Answer::kLine;) {
    const ssize_t put = ::write(to_, rest.data(), rest.size());
    if (put > 0) {
      rest.remove_prefix(static_cast<size_t>(put));
    } else if (put < 0 && errno == EAGAIN) {
      pollfd wait = {.fd = to_, .events = POLLOUT, .revents = 0};
      ::poll(&wait, 1, 100);
      if (now() > deadline) result = Answer::kTimeout;
    } else if (put < 0 && errno != EINTR) {
      break;  // it reads no more, but may have said something
    }
  }
  if (result == Answer::kLine) result = read_line(deadline, answer);
  if (result == Answer::kLine) return result;
  if (result == Answer::kEnded) ending_ = ended(pid_);
  kill_all();
  return result;
}

}  // namespace godwit::rl
