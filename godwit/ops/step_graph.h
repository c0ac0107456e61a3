// Work that is the same every time, recorded once and started as one launch (CUDA graphs). Where a device has
// no such thing, there is none.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace godwit::ops {

class StepGraph {
 public:
  virtual ~StepGraph() = default;
  // Starts the recorded work behind what was started before; does not wait for it.
  virtual void replay() = 0;
};

using GraphRecorder = std::unique_ptr<StepGraph> (*)(at::Device device, const std::function<void()>& work);

// Runs `work` twice, to warm up what it calls, then records it (it is not run a third time). Tensors that it
// reads and writes must outlive the graph and stay where they are; it must not wait for the device. Null on a
// device without graphs.
std::unique_ptr<StepGraph> record_graph(at::Device device, const std::function<void()>& work);

// For ops/cuda.
void set_graph_recorder(GraphRecorder recorder);

}  // namespace godwit::ops
