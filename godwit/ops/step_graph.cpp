#include "godwit/ops/step_graph.h"

namespace godwit::ops {
namespace {

GraphRecorder g_recorder = nullptr;

}  // namespace

void set_graph_recorder(GraphRecorder recorder) {
  g_recorder = recorder;
}

std::unique_ptr<StepGraph> record_graph(at::Device device, const std::function<void()>& work) {
  return device.is_cuda() && g_recorder ? g_recorder(device, work) : nullptr;
}

}  // namespace godwit::ops
