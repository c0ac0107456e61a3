#include "godwit/cli/op_profile.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <tuple>

#include "godwit/cli/support.h"

namespace godwit::cli {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

struct Span {
  uint64_t begin, end, thread, id;
  std::string name;
  const Span* parent = nullptr;
  uint64_t inside = 0;  // ns of the spans right inside it
};

constexpr size_t kLongestName = 96;
constexpr size_t kRows = 25;  // printed
constexpr size_t kInJson = 100;

// A kernel's signature up to its interesting part: without "void" and anonymous namespaces.
std::string kernel_name(std::string name) {
  if (name.starts_with("void ")) name.erase(0, 5);
  constexpr std::string_view kAnonymous = "(anonymous namespace)::";
  for (size_t at = name.find(kAnonymous); at != std::string::npos; at = name.find(kAnonymous))
    name.erase(at, kAnonymous.size());
  return name.size() > kLongestName ? name.substr(0, kLongestName) + "..." : name;
}

// Spans of one thread nest: finds what each lies in.
void find_parents(std::vector<Span>& spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::tie(a.thread, a.begin, b.end) < std::tie(b.thread, b.begin, a.end);
  });
  std::vector<Span*> open;
  for (Span& span : spans) {
    while (!open.empty() && (open.back()->thread != span.thread || open.back()->end <= span.begin))
      open.pop_back();
    if (!open.empty()) {
      span.parent = open.back();
      open.back()->inside += span.end - span.begin;
    }
    open.push_back(&span);
  }
}

// The nearest of this project's ops that the span lies in, or else the outermost op of ATen's.
const std::string& owner(const Span& span) {
  const Span* outermost = &span;
  for (const Span* at = &span; at != nullptr; at = at->parent) {
    if (at->name.starts_with("godwit::")) return at->name;
    if (at->name.starts_with("aten::")) outermost = at;
  }
  return outermost->name;
}

void add(std::map<std::string, ProfiledOp>& to, const std::string& name, uint64_t ns) {
  ProfiledOp& op = to[name];
  op.name = name;
  op.ms += static_cast<double>(ns) * 1e-6;
  ++op.calls;
}

std::vector<ProfiledOp> longest_first(const std::map<std::string, ProfiledOp>& ops) {
  std::vector<ProfiledOp> out;
  for (const auto& [name, op] : ops) out.push_back(op);
  std::sort(out.begin(), out.end(), [](const ProfiledOp& a, const ProfiledOp& b) { return a.ms > b.ms; });
  return out;
}

nlohmann::json rows_json(const std::vector<ProfiledOp>& ops) {
  nlohmann::json rows = nlohmann::json::array();
  for (size_t i = 0; i < std::min(kInJson, ops.size()); ++i)
    rows.push_back({{"name", ops[i].name}, {"ms", ops[i].ms}, {"calls", ops[i].calls}});
  return rows;
}

void print_rows(const std::vector<ProfiledOp>& ops, double busy_ms) {
  for (size_t i = 0; i < std::min(kRows, ops.size()); ++i) {
    print_out("  {:>9.3f} ms {:>5.1f} % {:>6} x  {}\n", ops[i].ms, 100 * ops[i].ms / busy_ms, ops[i].calls,
              ops[i].name);
  }
}

}  // namespace

OpProfile profile_ops(c10::Device device, const std::function<void()>& work) {
  const bool gpu = !device.is_cpu();
  setenv("KINETO_LOG_LEVEL", "99", /*overwrite=*/0);  // its own lines between ours
  const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  std::set<ActivityType> activities = {ActivityType::CPU};
  if (gpu) activities.insert(ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities,
                           {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
  work();
  if (gpu) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
  const auto result = profiler::disableProfiler();

  // The CPU's events are ops and calls of the CUDA runtime. These are linked to the op they were made in and
  // have numbers of their own, which must not be taken for those of ops.
  std::vector<Span> ops;
  for (const auto& event : result->events()) {
    if (event.deviceType() == at::kCPU && event.linkedCorrelationId() == 0 &&
        !event.name().starts_with("cuda"))
      ops.push_back(
          {event.startNs(), event.endNs(), event.startThreadId(), event.correlationId(), event.name()});
  }
  find_parents(ops);
  std::map<uint64_t, const Span*> by_id;
  for (const Span& op : ops) by_id.emplace(op.id, &op);

  std::map<std::string, ProfiledOp> by_op, by_kernel;
  OpProfile profile;
  uint64_t first = ~uint64_t{0}, last = 0;
  const auto count = [&](uint64_t begin, uint64_t end, uint64_t own) {
    first = std::min(first, begin);
    last = std::max(last, end);
    profile.busy_ms += static_cast<double>(own) * 1e-6;
  };
  for (const auto& event : result->events()) {
    if (!gpu || event.deviceType() == at::kCPU) continue;
    const auto launched_by = by_id.find(event.linkedCorrelationId());
    add(by_op, launched_by == by_id.end() ? "(no op)" : owner(*launched_by->second), event.durationNs());
    add(by_kernel, kernel_name(event.name()), event.durationNs());
    count(event.startNs(), event.endNs(), event.durationNs());
  }
  for (const Span& op : ops) {
    if (gpu) break;
    const uint64_t own = op.end - op.begin - op.inside;
    add(by_op, op.name, own);
    count(op.begin, op.end, own);
  }
  if (last > first) profile.wall_ms = static_cast<double>(last - first) * 1e-6;
  profile.ops = longest_first(by_op);
  profile.kernels = longest_first(by_kernel);
  return profile;
}

nlohmann::json profile_json(const OpProfile& profile) {
  return {{"busy_ms", profile.busy_ms},
          {"wall_ms", profile.wall_ms},
          {"ops", rows_json(profile.ops)},
          {"kernels", rows_json(profile.kernels)}};
}

void print_profile(std::string_view what, const OpProfile& profile) {
  print_out("  {}: {:.1f} ms busy of {:.1f} ms\n", what, profile.busy_ms, profile.wall_ms);
  print_rows(profile.ops, profile.busy_ms);
  if (profile.kernels.empty()) return;
  print_out("  the same by kernel:\n");
  print_rows(profile.kernels, profile.busy_ms);
}

}  // namespace godwit::cli
