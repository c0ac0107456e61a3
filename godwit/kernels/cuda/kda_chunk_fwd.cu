// Entry point of the KDA chunk forward: operand blocks, then the state pass; long sequences pass through
// segment maps and their scan.
#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"

namespace godwit::kernels::cuda {
namespace {

constexpr size_t align256(size_t n) {
  return (n + 255) / 256 * 256;
}

struct Plan {
  size_t blocks, maps, states;
  int64_t segments;
  bool cut;
};

Plan plan(const KdaInputs& in) {
  Plan p;
  p.segments = kda_segment_units(in.T, in.N, in.max_length, in.H);
  p.cut = p.segments != in.N;
  p.blocks = align256(size_t(kda_unit_count(in.T, in.N, kKdaChunk)) * in.H * sm90::Block::kBytes);
  p.maps = p.cut ? align256(size_t(p.segments) * in.H * 128 * 256 * 4) : 0;
  p.states = p.maps / 2;
  return p;
}

}  // namespace

size_t kda_chunk_fwd_workspace_bytes(const KdaInputs& in) {
  const Plan p = plan(in);
  return p.blocks + p.maps + p.states;
}

int kda_chunk_fwd(const KdaChunkFwdParams& p) {
  if (p.in.N == 0 || p.in.H == 0) return cudaSuccess;
  const Plan sizes = plan(p.in);
  uint8_t* const base = static_cast<uint8_t*>(p.workspace);
  sm90::KdaStateArgs a;
  a.in = p.in;
  a.blocks = base;
  a.o = p.o;
  a.final_state = p.final_state;
  a.checkpoint_slot = p.checkpoint_slot;
  a.checkpoints = p.checkpoints;
  a.segments = sizes.segments;
  cudaError_t e = sm90::launch_prepare(p.in, base, p.stream);
  if (e == cudaSuccess && sizes.cut) {
    a.segment_maps = reinterpret_cast<float*>(base + sizes.blocks);
    float* states = reinterpret_cast<float*>(base + sizes.blocks + sizes.maps);
    a.segment_states = states;
    e = sm90::launch_segment_maps(a, p.stream);
    if (e == cudaSuccess) e = sm90::launch_segment_scan(p.in, a.segment_maps, states, a.segments, p.stream);
  }
  return e != cudaSuccess ? e : sm90::launch_state_output(a, p.stream);
}

}  // namespace godwit::kernels::cuda
