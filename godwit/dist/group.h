// The processes that train one model together, and what they say to each other. A group of one process is the
// default: every call is then a no-op, so that nothing that uses a group asks whether it has one.
//
// All ranks make the same calls in the same order. A rank that dies or hangs ends all processes with a
// message that names it (monitor.h). Data parallelism is one group; further mesh axes are further groups over
// the same store.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "godwit/dist/launch.h"

namespace godwit::dist {

class Group {
 public:
  Group();  // this process alone
  // Meets the others. `device` decides the backend and is where tensors are reduced. Throws Error when not
  // all have come within join_s (at least timeout_s); from then on timeout_s bounds how long a dead or hung
  // rank goes unnoticed.
  Group(const Launch& launch, at::Device device, double timeout_s, double join_s = 60);
  // Without close() this is how a failing rank leaves: the others are told by fail_all, or notice.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int64_t rank() const;
  int64_t size() const;
  bool root() const { return rank() == 0; }

  // In place, over all ranks; every rank ends with the same bits. Lists travel in buckets.
  void sum(const std::vector<at::Tensor>& tensors);
  void max(at::Tensor& tensor);
  // From rank `root` to all.
  void broadcast(const at::Tensor& tensor, int64_t root = 0);
  std::string broadcast(const std::string& text, int64_t root = 0);
  std::vector<double> broadcast(const std::vector<double>& values);

  std::vector<double> sum(const std::vector<double>& values);
  bool any(bool value) { return sum(std::vector<double>{value ? 1.0 : 0.0})[0] > 0; }
  // The text of the lowest rank that has one; none where no rank has.
  std::optional<std::string> first(const std::optional<std::string>& text);

  // While one lives the others wait for this rank without limit: it sets itself up, writes a checkpoint or
  // evaluates.
  class Busy {
   public:
    explicit Busy(Group& group);
    ~Busy();
    Busy(const Busy&) = delete;
    Busy& operator=(const Busy&) = delete;

   private:
    Group& group_;
  };

  // All ranks have done their work: waits for them and takes the group down. The group is of one process
  // afterwards.
  void close();
  // This rank ends with an error: the others end with its message.
  void fail_all(const std::string& message);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null: one process
};

}  // namespace godwit::dist
