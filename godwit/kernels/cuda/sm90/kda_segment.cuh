// Which tokens a segment unit (kda_heuristic.h) stands for.
#pragma once

#include "godwit/kernels/cuda/sm90/kda_chunk.cuh"

namespace godwit::kernels::cuda::sm90 {

struct Segment {
  int n;                // sequence
  int64_t index;        // of the segment in its sequence
  int64_t token, end;   // [token, end)
  int64_t first_chunk;  // chunk slot of its first chunk
  int64_t chunks;
  bool last;   // the sequence ends here
  bool whole;  // the sequence is not cut
};

// False if the unit stands for nothing. An empty sequence has one segment without chunks.
__device__ __forceinline__ bool find_segment(const KdaInputs& in, int64_t unit, int64_t units, Segment& s) {
  const bool one_each = units == in.N;
  const int base = kda_base_segment(in.H);
  s.n = one_each ? int(unit) : find_sequence(in, unit, base);
  const int64_t begin = sequence_begin(in, s.n);
  s.end = sequence_begin(in, s.n + 1);
  s.index = one_each ? 0 : unit - kda_first_unit(begin, s.n, base);
  const int64_t length =
      one_each ? (s.end - begin + kChunk) / kChunk * kChunk : kda_segment_length(s.end - begin, in.H);
  s.whole = s.end - begin <= length;
  s.token = begin + s.index * length;
  if (s.index > 0 && s.token >= s.end) return false;
  s.last = s.token + length >= s.end;
  if (!s.last) s.end = s.token + length;
  s.first_chunk = kda_first_unit(begin, s.n, kChunk) + (s.token - begin) / kChunk;
  s.chunks = (s.end - s.token + kChunk - 1) / kChunk;
  return true;
}

}  // namespace godwit::kernels::cuda::sm90
