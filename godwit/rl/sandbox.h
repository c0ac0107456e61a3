// A program that is not trusted, as a child process that one talks to in lines.
//
// Where the kernel allows it the program lives in namespaces of its own (processes, mounts, network, IPC,
// host name): it sees /usr read-only, its own folder read-only as /program, and an empty /work in memory,
// which is its working directory and goes away with it; there is no network, and no process but its own. Root
// runs it under a user id that nothing else has; others in a user namespace. On top of that, everywhere: no
// new privileges, a system call filter, limits on CPU, memory, file size, open files and processes. Its
// processes die with the object.
//
// Where namespaces are refused, the limits and the filter are all there is: no network and no fork bomb, but
// files that the user may read can be read. That weaker form is used only when it is asked for.
//
// Linux on x86-64 and arm64.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace godwit::rl {

struct SandboxLimits {
  double cpu_s = 60;                          // of a process
  int64_t memory_bytes = int64_t{512} << 20;  // address space of a process
  int64_t work_bytes = int64_t{64} << 20;     // of /work
  int64_t processes = 16;
  int64_t open_files = 64;
  int64_t line_bytes = int64_t{16} << 20;  // a longer line is a flood
};

enum class Isolation { kNamespaces, kLimits };

class Sandbox {
 public:
  // `command`: the program, an absolute path as seen inside, and its arguments. `folder`: what is /program;
  // empty: none. Throws Error when it cannot be started: the namespaces are refused and `weaker` is not set,
  // or the program is not there. `best`: the form that is tried first.
  Sandbox(std::vector<std::string> command, const std::string& folder, const SandboxLimits& limits,
          bool weaker, Isolation best = Isolation::kNamespaces);
  ~Sandbox();
  Sandbox(const Sandbox&) = delete;
  Sandbox& operator=(const Sandbox&) = delete;

  enum class Answer { kLine, kTimeout, kEnded, kFlood };
  // Writes a line and waits for one. After anything but kLine the program is killed.
  Answer ask(std::string_view line, double timeout_s, std::string& answer);

  // How it ended, in words: after kEnded.
  std::string ending() const { return ending_; }
  Isolation isolation() const { return isolation_; }
  pid_t pid() const { return pid_; }

 private:
  void start(const std::vector<std::string>& command, const std::string& folder, Isolation isolation);
  void kill_all();
  Answer read_line(double deadline, std::string& answer);

  SandboxLimits limits_;
  Isolation isolation_ = Isolation::kNamespaces;
  pid_t pid_ = -1;
  int to_ = -1, from_ = -1;
  std::optional<uid_t> place_;  // what its user id comes from
  std::string root_;            // an empty directory that the inside is mounted on
  std::string pending_;
  std::string ending_;
};

}  // namespace godwit::rl
