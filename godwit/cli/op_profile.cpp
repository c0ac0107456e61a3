#include "godwit/cli/op_profile.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

namespace godwit::cli {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

struct Span {
  uint64_t begin, end, thread;
  std::string name;
};

// "void at::native::foo<...>(...)" to "at::native::foo".
std::string kernel_name(std::string name) {
  if (name.starts_with("void ")) name.erase(0, 5);
  const size_t from = name.starts_with("(anonymous namespace)::") ? 23 : 0;
  const size_t end = name.find_first_of("<(", from);
  return name.substr(from, end == std::string::npos ? end : end - from);
}

// Spans of one thread nest: what lies inside a span is taken off its own time.
void add_nested(std::vector<Span>& spans, std::map<std::string, ProfiledOp>& ops) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) {
    return std::tie(a.thread, a.begin, b.end) < std::tie(b.thread, b.begin, a.end);
  });
  std::vector<const Span*> open;
  for (const Span& span : spans) {
    while (!open.empty() && (open.back()->thread != span.thread || open.back()->end <= span.begin))
      open.pop_back();
    const double ms = static_cast<double>(span.end - span.begin) * 1e-6;
    ProfiledOp& op = ops[span.name];
    op.ms += ms;
    ++op.calls;
    if (!open.empty()) ops[open.back()->name].ms -= ms;
    open.push_back(&span);
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

  std::vector<Span> spans;
  for (const auto& event : result->events()) {
    if ((event.deviceType() == at::kCPU) == gpu) continue;
    spans.push_back({event.startNs(), event.endNs(), gpu ? 0 : event.startThreadId(),
                     gpu ? kernel_name(event.name()) : event.name()});
  }
  std::map<std::string, ProfiledOp> by_name;
  OpProfile profile;
  uint64_t first = ~uint64_t{0}, last = 0;
  for (const Span& span : spans) {
    first = std::min(first, span.begin);
    last = std::max(last, span.end);
  }
  add_nested(spans, by_name);
  if (!spans.empty()) profile.wall_ms = static_cast<double>(last - first) * 1e-6;
  for (auto& [name, op] : by_name) {
    op.name = name;
    profile.busy_ms += op.ms;
    profile.ops.push_back(op);
  }
  std::sort(profile.ops.begin(), profile.ops.end(),
            [](const ProfiledOp& a, const ProfiledOp& b) { return a.ms > b.ms; });
  return profile;
}

}  // namespace godwit::cli
