// CUDA graphs for ops/step_graph.h.
#include "godwit/ops/step_graph.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace godwit::ops {
namespace {

class Recorded : public StepGraph {
 public:
  Recorded(at::Device device, const std::function<void()>& work) {
    const c10::cuda::CUDAGuard guard(device);
    const c10::cuda::CUDAStream caller = c10::cuda::getCurrentCUDAStream();
    caller.synchronize();
    const c10::cuda::CUDAStream stream =
        c10::cuda::getStreamFromPool();  // the default stream cannot be recorded
    {
      const c10::cuda::CUDAStreamGuard on(stream);
      work(), work();
      stream.synchronize();
      graph_.capture_begin();
      try {
        work();
      } catch (...) {
        graph_.capture_end();
        throw;
      }
      graph_.capture_end();
    }
  }
  void replay() override { graph_.replay(); }

 private:
  at::cuda::CUDAGraph graph_;
};

[[maybe_unused]] const bool g_joined = [] {
  set_graph_recorder([](at::Device device, const std::function<void()>& work) -> std::unique_ptr<StepGraph> {
    return std::make_unique<Recorded>(device, work);
  });
  return true;
}();

}  // namespace
}  // namespace godwit::ops
