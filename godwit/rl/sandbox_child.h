// What happens between the birth of a sandboxed process and its program: nothing but system calls, as the
// parent may have had other threads. Everything that needs memory is prepared here.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "godwit/rl/sandbox.h"

namespace godwit::rl {

struct BindMount {
  std::string from, to;
  bool is_file = false;
};

struct ChildPlan {
  std::vector<std::string> command;
  SandboxLimits limits;
  bool namespaces = true;
  bool as_root = false;  // the parent is root: no user namespace, another user id
  uid_t uid = 0;         // of the program, where as_root
  std::string root;
  std::vector<std::string> folders;                        // to make in root, parents first
  std::vector<BindMount> binds;                            // read-only
  std::vector<std::pair<std::string, std::string>> links;  // to, at
  std::string work_options;                                // of the tmpfs
  int stdin_fd = -1, stdout_fd = -1, report_fd = -1, go_fd = -1;
};

// Reported by a child that could not become its program.
struct ChildFailure {
  char step[32];
  int error;
};

// Does not come back.
[[noreturn]] void become_program(const ChildPlan& plan, char* const* argv, char* const* envp);

// The plan's mounts for this machine.
void plan_mounts(const std::string& folder, ChildPlan& plan);

}  // namespace godwit::rl
