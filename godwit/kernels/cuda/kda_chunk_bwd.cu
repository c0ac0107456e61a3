// Entry point of the KDA chunk backward. Nothing is kept from the forward: operand blocks, chunk states and U
// are made again, the gradient of the state is carried back over the chunks, then every chunk makes its
// gradients on its own.
#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"
#include "godwit/kernels/cuda/sm90/kda_launch.cuh"

namespace godwit::kernels::cuda {
namespace {

constexpr size_t align256(size_t n) {
  return (n + 255) / 256 * 256;
}

struct Plan {
  size_t blocks, states, u, dt, A, db;
  size_t total() const { return blocks + 2 * states + u + dt + A + db; }
};

Plan plan(const KdaInputs& in) {
  const size_t units = size_t(kda_unit_count(in.T, in.N, kKdaChunk)) * in.H;
  return {align256(units * sm90::Block::kBytes),
          align256(units * 128 * 128 * 2),
          align256(size_t(in.T) * in.H * 128 * 2),
          align256(units * 128 * 4),
          align256(units * 4),
          align256(units * 128 * 4)};
}

}  // namespace

size_t kda_chunk_bwd_workspace_bytes(const KdaInputs& in) {
  return plan(in).total();
}

int kda_chunk_bwd(const KdaChunkBwdParams& p) {
  if (p.in.N == 0 || p.in.H == 0) return cudaSuccess;
  const Plan sizes = plan(p.in);
  uint8_t* at = static_cast<uint8_t*>(p.workspace);
  const auto take = [&](size_t bytes) { return at += bytes, at - bytes; };
  uint8_t* const blocks = take(sizes.blocks);
  uint8_t* const states = take(sizes.states);
  sm90::KdaBwdArgs b;
  b.in = p.in;
  b.blocks = blocks, b.chunk_states = states, b.chunk_gradients = take(sizes.states);
  uint8_t* const u = take(sizes.u);
  b.u = u;
  b.dt_part = reinterpret_cast<float*>(take(sizes.dt)), b.A_part = reinterpret_cast<float*>(take(sizes.A));
  b.db_part = reinterpret_cast<float*>(take(sizes.db));
  b.d_o = p.d_o, b.d_final_state = p.d_final_state;
  b.dq = p.dq, b.dk = p.dk, b.dv = p.dv, b.dz = p.dz, b.db = p.db;
  b.dA_log = p.dA_log, b.d_dt_bias = p.d_dt_bias, b.d_initial_state = p.d_initial_state;
  sm90::KdaStateArgs s;
  s.in = p.in;
  s.blocks = blocks, s.chunk_states = states, s.u = u;
  s.segments = p.in.N;  // states of every chunk are wanted in order: sequences are not cut here
  cudaError_t e = sm90::launch_prepare(p.in, blocks, p.stream);
  if (e == cudaSuccess) e = sm90::launch_state_record(s, p.stream);
  if (e == cudaSuccess) e = sm90::launch_bwd_state(b, p.stream);
  return e != cudaSuccess ? e : sm90::launch_bwd_gradients(b, p.stream);
}

}  // namespace godwit::kernels::cuda
