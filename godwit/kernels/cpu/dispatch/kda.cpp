#include "godwit/kernels/kda.h"

#include "godwit/kernels/cpu/dispatch/isa.h"

namespace godwit::kernels {

namespace avx2 {
void kda_chunk_forward(const KdaForward& p);
void kda_chunk_backward(const KdaBackward& p);
void kda_step(const KdaStep& p);
}  // namespace avx2
namespace avx512 {
void kda_chunk_forward(const KdaForward& p);
void kda_chunk_backward(const KdaBackward& p);
void kda_step(const KdaStep& p);
}  // namespace avx512

void kda_chunk_forward(const KdaForward& p) {
  GODWIT_DISPATCH(kda_chunk_forward, p);
}
void kda_chunk_backward(const KdaBackward& p) {
  GODWIT_DISPATCH(kda_chunk_backward, p);
}
void kda_step(const KdaStep& p) {
  GODWIT_DISPATCH(kda_step, p);
}

}  // namespace godwit::kernels
