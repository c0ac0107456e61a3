// How a Kimi Delta Attention sequence is cut for the GPU: pure arithmetic, the same on host and device,
// testable without one.
//
// Chunks are 16 tokens, counted from the start of their sequence. A long sequence is cut into segments that
// run in parallel: each yields an affine map S -> A S + B, a scan joins the maps, and the segments run again
// from their true entering state. The cut depends on the sequence's own length and on H only, never on what
// else is in the batch, so that a sequence alone and in a batch gives the same bits.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define GODWIT_HOST_DEVICE __host__ __device__
#else
#define GODWIT_HOST_DEVICE
#endif

namespace godwit::kernels::cuda {

constexpr int kKdaChunk =
    16;  // with a bound of -5 a chunk decays by at most e^-80, whose inverse is still a bf16
constexpr int kKdaMinSegment = 512;  // tokens; shorter segments would cost more to join than they save
constexpr int kKdaMinSplit = 4;      // a sequence is cut only when this many segments come out
constexpr int kKdaMaxCutHeads =
    48;  // cutting costs 2.3 times the work of the state pass: with more heads an uncut sequence is faster

// Tokens of the shortest segment: few heads need short segments to fill the device.
GODWIT_HOST_DEVICE constexpr int kda_base_segment(int heads) {
  int length = kKdaMinSegment;
  while (length < 85 * heads && length < 8192) length *= 2;
  return length;
}

// Most segments of one sequence. More would only lengthen the serial scan once the device is full.
GODWIT_HOST_DEVICE constexpr int kda_max_segments(int heads) {
  int count = 128;
  while (count > 8 && count * heads > 512) count /= 2;
  return count;
}

// Tokens of one segment of a sequence of `length` tokens; at least `length` if it is not cut. A multiple
// of 16.
GODWIT_HOST_DEVICE constexpr int64_t kda_segment_length(int64_t length, int heads) {
  int64_t segment = kda_base_segment(heads);
  if (heads > kKdaMaxCutHeads || length < kKdaMinSplit * segment)
    return (length + kKdaChunk - 1) / kKdaChunk * kKdaChunk + kKdaChunk;
  while (length > kda_max_segments(heads) * segment) segment *= 2;
  return segment;
}

// Units of `unit` tokens that sequences take are numbered without a prefix sum: sequence n, which begins at
// token `begin`, owns the numbers from begin / unit + n on. They are disjoint and increasing; a few numbers
// stay unused.
GODWIT_HOST_DEVICE constexpr int64_t kda_first_unit(int64_t begin, int64_t n, int unit) {
  return begin / unit + n;
}
GODWIT_HOST_DEVICE constexpr int64_t kda_unit_count(int64_t tokens, int64_t sequences, int unit) {
  return tokens / unit + sequences;
}

// Segments are numbered in units of the shortest segment; 1 per sequence if none can be cut.
GODWIT_HOST_DEVICE constexpr int64_t kda_segment_units(int64_t tokens, int64_t sequences, int64_t max_length,
                                                       int heads) {
  const bool cut = kda_segment_length(max_length, heads) < max_length;
  return cut ? kda_unit_count(tokens, sequences, kda_base_segment(heads)) : sequences;
}

}  // namespace godwit::kernels::cuda
