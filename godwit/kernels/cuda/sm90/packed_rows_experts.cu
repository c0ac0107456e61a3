// The experts' two products with int8 or MXFP4 weights. Few rows an expert, as when decoding: the time is
// that of the weights' way from memory. Of one token there are not many, so a block's warps share a sum; of
// several every warp has features of its own, and a block more of them, as starting one takes longer than
// its loads. Many: as many rows as registers have sums for take part in each unpacking.
#include <algorithm>

#include "godwit/kernels/cuda/sm90/packed_rows.cuh"
#include "godwit/kernels/cuda/sm90/packed_rows.h"

namespace godwit::kernels::cuda::sm90 {
namespace {

using One = PackedForm<4, 2, 16>;
using Few = PackedForm<1, 2, 16>;
using Many = PackedForm<1, 1, 64>;
constexpr int64_t kOneTokens = 4;
constexpr int64_t kFewRows = 8;  // of an expert, on average

bool few_rows(const MoeShape& s) {
  return s.tokens <= Few::kMostRows || s.tokens * s.k <= kFewRows * s.experts;
}

// Upper bound of the tiles, as real rows count: padding starts none.
int64_t most_tiles(const ExpertPlan& plan, const MoeShape& s) {
  return std::min(plan.slots, s.experts) + plan.slots / plan.tile_rows;
}

template <Packing kPacking, bool kPairs>
cudaError_t launch(const PackedRowsArgs& args, const ExpertPlan& plan, const MoeShape& s,
                   cudaStream_t stream) {
  const int64_t tiles = most_tiles(plan, s);
  if (!few_rows(s)) return launch_packed_rows<kPacking, kPairs, Many>(args, tiles, stream);
  return s.tokens <= kOneTokens ? launch_packed_rows<kPacking, kPairs, One>(args, tiles, stream)
                                : launch_packed_rows<kPacking, kPairs, Few>(args, tiles, stream);
}

template <bool kPairs>
cudaError_t launch(PackedRowsArgs args, const ExpertPlan& plan, const MoeShape& s, MoeFormat format,
                   cudaStream_t stream) {
  args.tiles = plan.tiles, args.totals = plan.totals, args.row_slot = plan.row_slot, args.form = s.form;
  return format == MoeFormat::kInt8 ? launch<Packing::kInt8, kPairs>(args, plan, s, stream)
                                    : launch<Packing::kMxfp4, kPairs>(args, plan, s, stream);
}

PackedMatrix matrix(const void* values, const void* scales) {
  return {static_cast<const uint8_t*>(values), scales};
}

}  // namespace

int packed_rows_tile(const MoeShape& shape) {
  return few_rows(shape) ? Few::kMostRows : Many::kMostRows;
}

cudaError_t launch_packed_rows_glu(const ExpertPlan& plan, const MoeShape& s, const MoeWeights& w,
                                   const void* z, void* h, cudaStream_t stream) {
  PackedRowsArgs args;
  args.first = matrix(w.w1, w.s1), args.second = matrix(w.w3, w.s3);
  args.features = int(s.inner), args.width = int(s.width), args.k = int(s.k);
  args.x = static_cast<const __nv_bfloat16*>(z), args.out = static_cast<__nv_bfloat16*>(h);
  return launch<true>(args, plan, s, w.format, stream);
}

cudaError_t launch_packed_rows_out(const ExpertPlan& plan, const MoeShape& s, const MoeWeights& w,
                                   const void* h, void* y, cudaStream_t stream) {
  PackedRowsArgs args;
  args.first = matrix(w.w2, w.s2);
  args.features = int(s.width), args.width = int(s.inner);
  args.x = static_cast<const __nv_bfloat16*>(h), args.out = static_cast<__nv_bfloat16*>(y);
  return launch<false>(args, plan, s, w.format, stream);
}

}  // namespace godwit::kernels::cuda::sm90
