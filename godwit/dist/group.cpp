#include "godwit/dist/group.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Logging.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "godwit/base/check.h"
#include "godwit/dist/backend.h"
#include "godwit/dist/monitor.h"

namespace godwit::dist {
namespace {

using c10d::Store;
using Millis = std::chrono::milliseconds;

// Large enough that the cost of a call does not matter, small enough that copying one overlaps with sending
// another.
constexpr int64_t kBucketBytes = 25 << 20;

// c10d logs every broken connection with a stack trace, from every process; what there is to say the monitor
// says in a line. TORCH_CPP_LOG_LEVEL brings it back.
void quiet_c10d() {
  if (std::getenv("TORCH_CPP_LOG_LEVEL") != nullptr) return;
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", /*overwrite=*/1);
  c10::initLogging();
}

std::string host_name() {
  std::array<char, 256> name = {};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "unknown";
}

c10::intrusive_ptr<Store> connect(const Launch& launch, bool serves, Millis timeout) {
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = serves;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return c10::make_intrusive<c10d::PrefixStore>("godwit/" + launch.attempt,
                                                  c10::make_intrusive<c10d::TCPStore>(launch.host, options));
  } catch (const c10::Error& error) {
    fail("rank {} cannot {} {}:{} (MASTER_ADDR, MASTER_PORT): {}", launch.rank,
         serves ? "open the meeting place" : "reach the meeting place", launch.host, launch.port,
         error.what_without_backtrace());
  }
}

// Each rank's value of `key`; waits for all of them.
std::vector<std::string> exchange(Store& store, const std::string& key, const Launch& launch,
                                  const std::string& value, Millis timeout) {
  store.set(key + "/" + std::to_string(launch.rank), std::vector<uint8_t>(value.begin(), value.end()));
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::vector<std::string> all;
  for (int64_t r = 0; r < launch.size; ++r) {
    const std::string name = key + "/" + std::to_string(r);
    try {
      const auto left = std::chrono::duration_cast<Millis>(end - std::chrono::steady_clock::now());
      store.wait({name}, std::max(left, Millis(1)));
      const std::vector<uint8_t> got = store.get(name);
      all.emplace_back(got.begin(), got.end());
    } catch (const c10::Error&) {
      fail("rank {} of {} has not come to {}:{} within {:.0f} s", r, launch.size, launch.host, launch.port,
           static_cast<double>(timeout.count()) * 1e-3);
    }
  }
  return all;
}

}  // namespace

struct Group::Impl {
  Launch launch;
  at::Device device = at::kCPU;
  c10::intrusive_ptr<Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  std::unique_ptr<Monitor> monitor;
  int busy = 0;

  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // Runs what `start` begins to its end, under the monitor's eyes.
  void collective(const char* name, const std::function<Works()>& start) {
    monitor->enter(name);
    try {
      for (const auto& work : start()) work->wait();
      if (device.is_cuda()) c10::impl::getDeviceGuardImpl(device.type())->synchronizeDevice(device.index());
    } catch (const c10::Error& error) {
      monitor->broken(error.what_without_backtrace());
    } catch (const std::exception& error) {
      monitor->broken(error.what());
    }
    monitor->leave();
  }

  c10::intrusive_ptr<c10d::Work> reduce(at::Tensor& tensor, c10d::ReduceOp::RedOpType op) {
    std::vector<at::Tensor> list = {tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = op;
    return backend->allreduce(list, options);
  }
};

Group::Group() = default;

Group::Group(const Launch& launch, at::Device device, double timeout_s, double join_s) {
  if (launch.size == 1) return;
  quiet_c10d();
  const Millis timeout(static_cast<int64_t>(std::max(timeout_s, join_s) * 1000));
  auto impl = std::make_unique<Impl>();
  impl->launch = launch;
  impl->device = device;
  const bool serves = launch.rank == 0 && !launch.store_is_up;
  impl->store = connect(launch, serves, timeout);
  const auto hosts = exchange(*impl->store, "host", launch, host_name(), timeout);
  const std::string owner = launch.store_is_up
                                ? fmt::format("the launcher's store at {}:{}", launch.host, launch.port)
                                : fmt::format("rank 0 (host {})", hosts[0]);
  impl->monitor =
      std::make_unique<Monitor>(MonitorOptions{.store = connect(launch, /*serves=*/false, timeout),
                                               .store_owner = owner,
                                               .serves_store = serves,
                                               .rank = launch.rank,
                                               .hosts = hosts,
                                               .timeout_s = timeout_s});
  exchange(*impl->store, "watched", launch, "", timeout);
  impl->monitor->start();
  try {
    impl->backend = make_backend(device, c10::make_intrusive<c10d::PrefixStore>("data", impl->store),
                                 launch.rank, launch.size);
  } catch (const std::exception& error) {
    impl->monitor->announce(error.what());
    throw;
  }
  impl_ = std::move(impl);
}

Group::~Group() = default;

int64_t Group::rank() const {
  return impl_ ? impl_->launch.rank : 0;
}
int64_t Group::size() const {
  return impl_ ? impl_->launch.size : 1;
}

void Group::sum(const std::vector<at::Tensor>& tensors) {
  if (!impl_ || tensors.empty()) return;
  struct Bucket {
    std::vector<at::Tensor> tensors;
    at::Tensor flat;
  };
  std::vector<Bucket> buckets;
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    const int64_t more = tensor.numel() * static_cast<int64_t>(tensor.element_size());
    if (buckets.empty() || bytes + more > kBucketBytes ||
        buckets.back().tensors.back().scalar_type() != tensor.scalar_type()) {
      buckets.emplace_back();
      bytes = 0;
    }
    buckets.back().tensors.push_back(tensor);
    bytes += more;
  }
  impl_->collective("a sum", [&] {
    Impl::Works works;
    for (Bucket& bucket : buckets) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& tensor : bucket.tensors) flat.push_back(tensor.detach().reshape({-1}));
      bucket.flat = at::cat(flat).to(impl_->device);
      works.push_back(impl_->reduce(bucket.flat, c10d::ReduceOp::SUM));
    }
    return works;
  });
  for (const Bucket& bucket : buckets) {
    int64_t at = 0;
    for (const at::Tensor& tensor : bucket.tensors) {
      tensor.detach().copy_(bucket.flat.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  }
}

void Group::max(at::Tensor& tensor) {
  if (!impl_) return;
  at::Tensor there = tensor.to(impl_->device).contiguous().clone();
  impl_->collective("a maximum", [&] { return Impl::Works{impl_->reduce(there, c10d::ReduceOp::MAX)}; });
  tensor.copy_(there);
}

void Group::broadcast(const at::Tensor& tensor, int64_t root) {
  if (!impl_ || tensor.numel() == 0) return;
  std::vector<at::Tensor> list = {tensor.detach().to(impl_->device).contiguous()};
  impl_->collective("a broadcast", [&] {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return Impl::Works{impl_->backend->broadcast(list, options)};
  });
  if (rank() != root && !list[0].is_same(tensor)) tensor.detach().copy_(list[0]);
}

std::string Group::broadcast(const std::string& text, int64_t root) {
  if (!impl_) return text;
  at::Tensor length = at::full({1}, static_cast<int64_t>(text.size()), at::kLong);
  broadcast(length, root);
  at::Tensor bytes = at::zeros({length.item<int64_t>()}, at::kByte);
  auto* data = reinterpret_cast<char*>(bytes.mutable_data_ptr<uint8_t>());
  if (rank() == root) std::copy(text.begin(), text.end(), data);
  broadcast(bytes, root);
  return {data, static_cast<size_t>(bytes.numel())};
}

std::vector<double> Group::broadcast(const std::vector<double>& values) {
  if (!impl_) return values;
  at::Tensor tensor = at::tensor(values, at::kDouble);
  broadcast(tensor);
  const auto* data = tensor.const_data_ptr<double>();
  return {data, data + values.size()};
}

std::vector<double> Group::sum(const std::vector<double>& values) {
  if (!impl_) return values;
  const at::Tensor tensor = at::tensor(values, at::kDouble);
  sum(std::vector<at::Tensor>{tensor});
  const auto* data = tensor.const_data_ptr<double>();
  return {data, data + values.size()};
}

std::optional<std::string> Group::first(const std::optional<std::string>& text) {
  if (!impl_) return text;
  at::Tensor owner = at::full({1}, text ? -rank() : -size(), at::kLong);
  max(owner);
  const int64_t lowest = -owner.item<int64_t>();
  if (lowest == size()) return std::nullopt;
  return broadcast(text.value_or(""), lowest);
}

Group::Busy::Busy(Group& group) : group_(group) {
  if (group_.impl_ && group_.impl_->busy++ == 0) group_.impl_->monitor->busy(true);
}
Group::Busy::~Busy() {
  if (group_.impl_ && --group_.impl_->busy == 0) group_.impl_->monitor->busy(false);
}

void Group::close() {
  if (!impl_) return;
  any(false);  // all have come
  impl_->monitor->stop();
  impl_->backend->shutdown();
  // Rank 0 may serve the store: it goes last.
  const Millis patience(10'000);
  try {
    if (root()) {
      exchange(*impl_->store, "closed", impl_->launch, "", patience);
    } else {
      impl_->store->set("closed/" + std::to_string(rank()), std::vector<uint8_t>{});
    }
  } catch (const std::exception&) {  // the work is done and saved: a rank that dies now is nobody's loss
  }
  impl_.reset();
}

void Group::fail_all(const std::string& message) {
  if (!impl_) return;
  impl_->monitor->announce(message);
}

}  // namespace godwit::dist
