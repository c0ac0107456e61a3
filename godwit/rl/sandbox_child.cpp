#include "godwit/rl/sandbox_child.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>

namespace godwit::rl {
namespace {

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#else
constexpr uint32_t kArchitecture = 0;  // every call is refused: the program does not start
#endif

constexpr int kMemfdSecret = 447;  // both architectures; not in the headers of 5.10

// Refused with EPERM: networks, other processes, mounts, namespaces, the kernel itself, and memory that no
// process's limit counts. (clone3's flags cannot be looked at, so it does not exist; the C library then uses
// clone.)
constexpr int kRefused[] = {SYS_socket,
                            SYS_shmget,
                            SYS_shmat,
                            SYS_msgget,
                            SYS_mq_open,
                            SYS_memfd_create,
                            kMemfdSecret,
                            SYS_ptrace,
                            SYS_process_vm_readv,
                            SYS_process_vm_writev,
                            SYS_mount,
                            SYS_umount2,
                            SYS_pivot_root,
                            SYS_chroot,
                            SYS_unshare,
                            SYS_setns,
                            SYS_open_by_handle_at,
                            SYS_keyctl,
                            SYS_add_key,
                            SYS_request_key,
                            SYS_bpf,
                            SYS_perf_event_open,
                            SYS_kexec_load,
                            SYS_init_module,
                            SYS_finit_module,
                            SYS_delete_module,
                            SYS_reboot,
                            SYS_swapon,
                            SYS_swapoff,
                            SYS_userfaultfd,
                            SYS_io_uring_setup,
                            SYS_acct,
                            SYS_quotactl,
                            SYS_syslog,
                            SYS_sethostname,
                            SYS_settimeofday,
                            SYS_clock_settime,
                            SYS_move_pages};
// Refused where there is no process namespace that would take its processes along: what leaves the process
// group would outlive it.
constexpr int kRefusedInWeaker[] = {SYS_setsid, SYS_setpgid};
constexpr uint32_t kNewNamespace = 0x7e020000;  // CLONE_NEW* but NEWTIME, which clone does not take

struct Child {
  const ChildPlan& plan;
  int report;

  [[noreturn]] void give_up(const char* step) const {
    ChildFailure failure = {};
    failure.error = errno;
    for (size_t i = 0; step[i] != 0 && i + 1 < sizeof failure.step; ++i) failure.step[i] = step[i];
    [[maybe_unused]] const ssize_t written = ::write(report, &failure, sizeof failure);
    ::_exit(127);
  }
  void need(bool done, const char* step) const {
    if (!done) give_up(step);
  }

  void limit(int resource, int64_t value) const {
    const struct rlimit r = {static_cast<rlim_t>(value), static_cast<rlim_t>(value)};
    need(::setrlimit(static_cast<__rlimit_resource_t>(resource), &r) == 0, "limits");
  }

  void limits() const {
    limit(RLIMIT_CPU, static_cast<int64_t>(plan.limits.cpu_s) + 1);
    limit(RLIMIT_AS, plan.limits.memory_bytes);
    limit(RLIMIT_FSIZE, plan.limits.work_bytes);
    limit(RLIMIT_NOFILE, plan.limits.open_files);
    limit(RLIMIT_NPROC, plan.limits.processes);
    limit(RLIMIT_CORE, 0);
  }

  void mounts() const {
    need(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0, "private mounts");
    need(::mount("tmpfs", plan.root.c_str(), "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755") == 0, "root");
    for (const std::string& folder : plan.folders) need(::mkdir(folder.c_str(), 0755) == 0, "folder");
    for (const BindMount& bind : plan.binds) {
      if (bind.is_file) {
        const int fd = ::open(bind.to.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        need(fd >= 0, "file");
        ::close(fd);
      }
      need(::mount(bind.from.c_str(), bind.to.c_str(), nullptr, MS_BIND | MS_REC, nullptr) == 0, "bind");
      if (!bind.is_file) {
        need(::mount(nullptr, bind.to.c_str(), nullptr,
                     MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV, nullptr) == 0,
             "read-only");
      }
    }
    for (const auto& [to, at] : plan.links) need(::symlink(to.c_str(), at.c_str()) == 0, "link");
    need(::chdir(plan.root.c_str()) == 0, "root");
    // A container may not allow it; then there is no /proc inside.
    ::mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, nullptr);
    need(::mount("tmpfs", "work", "tmpfs", MS_NOSUID | MS_NODEV, plan.work_options.c_str()) == 0, "work");
    need(::syscall(SYS_pivot_root, ".", ".") == 0, "pivot");
    need(::umount2(".", MNT_DETACH) == 0, "old root");
    need(::chdir("/work") == 0, "work");
  }

  // Nothing of what root or a user namespace may do is left.
  void drop_rights() const {
    if (plan.as_root) {
      need(::syscall(SYS_setgroups, 0, nullptr) == 0, "groups");
      need(::syscall(SYS_setresgid, plan.uid, plan.uid, plan.uid) == 0, "group id");
      need(::syscall(SYS_setresuid, plan.uid, plan.uid, plan.uid) == 0, "user id");
    }
    for (int cap = 0; cap < 64; ++cap) ::prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    __user_cap_header_struct header = {};
    header.version = _LINUX_CAPABILITY_VERSION_3;
    __user_cap_data_struct none[2] = {};
    need(::syscall(SYS_capset, &header, none) == 0, "capabilities");
    need(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0, "privileges");
    need(::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0, "parent's death");
  }

  void filter_calls() const {
    constexpr size_t kMost = 16 + 2 * (std::size(kRefused) + std::size(kRefusedInWeaker));
    sock_filter code[kMost];
    unsigned short n = 0;
    const auto load = [&](size_t offset) {
      code[n++] = BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset));
    };
    const auto give = [&](uint32_t result) { code[n++] = BPF_STMT(BPF_RET | BPF_K, result); };
    load(offsetof(seccomp_data, arch));
    code[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0);
    give(SECCOMP_RET_KILL_PROCESS);
    load(offsetof(seccomp_data, nr));
    code[n++] = BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1);  // x86's x32 has other numbers
    give(SECCOMP_RET_KILL_PROCESS);
    const auto refuse = [&](int call) {
      code[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(call), 0, 1);
      give(SECCOMP_RET_ERRNO | EPERM);
    };
    for (const int call : kRefused) refuse(call);
    if (!plan.namespaces)
      for (const int call : kRefusedInWeaker) refuse(call);
    code[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 0, 1);
    give(SECCOMP_RET_ERRNO | ENOSYS);
    code[n++] = BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3);
    load(offsetof(seccomp_data, args[0]));
    code[n++] = BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kNewNamespace, 0, 1);
    give(SECCOMP_RET_ERRNO | EPERM);
    give(SECCOMP_RET_ALLOW);
    const sock_fprog program = {.len = n, .filter = code};
    need(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0, "filter");
  }
};

}  // namespace

void plan_mounts(const std::string& folder, ChildPlan& plan) {
  namespace fs = std::filesystem;
  for (const char* name : {"", "/dev", "/etc", "/proc", "/work"})
    if (*name != 0) plan.folders.push_back(plan.root + name);
  const auto directory = [&](const std::string& from, const std::string& to) {
    plan.folders.push_back(plan.root + to);
    plan.binds.push_back({.from = from, .to = plan.root + to});
  };
  directory("/usr", "/usr");
  for (const char* name : {"/bin", "/lib", "/lib64", "/sbin"}) {
    if (fs::is_symlink(name))
      plan.links.emplace_back(fs::read_symlink(name).string(), plan.root + name);
    else if (fs::is_directory(name))
      directory(name, name);
  }
  if (fs::is_directory("/etc/alternatives")) directory("/etc/alternatives", "/etc/alternatives");
  for (const char* name : {"/dev/null", "/dev/zero", "/dev/urandom", "/etc/ld.so.cache"})
    if (fs::exists(name)) plan.binds.push_back({.from = name, .to = plan.root + name, .is_file = true});
  plan.links.emplace_back("work", plan.root + "/tmp");
  if (!folder.empty()) directory(fs::absolute(folder).string(), "/program");
}

void become_program(const ChildPlan& plan, char* const* argv, char* const* envp) {
  Child child{plan, plan.report_fd};
  if (plan.go_fd >= 0) {  // the parent writes the user namespace's ids first
    char go = 0;
    child.need(::read(plan.go_fd, &go, 1) == 1, "user namespace");
  }
  child.need(::setsid() >= 0, "session");
  const int in = ::fcntl(plan.stdin_fd, F_DUPFD, 10), out = ::fcntl(plan.stdout_fd, F_DUPFD, 10);
  const int null = ::open("/dev/null", O_WRONLY), report = ::fcntl(plan.report_fd, F_DUPFD, 10);
  child.need(::dup2(in, 0) == 0 && ::dup2(out, 1) == 1 && ::dup2(null, 2) == 2, "pipes");
  child.need(::dup3(report, 3, O_CLOEXEC) == 3, "report");
  child.report = 3;
  if (::syscall(SYS_close_range, 4, ~0U, 0) != 0)
    for (int fd = 4; fd < 65536; ++fd) ::close(fd);
  if (!plan.namespaces) child.need(::chdir(plan.root.c_str()) == 0, "work");
  if (plan.namespaces) child.mounts();
  child.limits();
  child.drop_rights();
  for (int signal = 1; signal < 32; ++signal) ::signal(signal, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  child.need(::access(plan.command.front().c_str(), X_OK) == 0, "program");
  child.filter_calls();
  ::execve(argv[0], argv, envp);
  child.give_up("program");
}

}  // namespace godwit::rl
