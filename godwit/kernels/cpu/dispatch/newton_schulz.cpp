#include "godwit/kernels/newton_schulz.h"

#include "godwit/kernels/cpu/dispatch/isa.h"

namespace godwit::kernels {

namespace avx2 {
void newton_schulz(const NewtonSchulzParams& params);
}
namespace avx512 {
void newton_schulz(const NewtonSchulzParams& params);
}

void newton_schulz_cpu(const NewtonSchulzParams& params) {
  GODWIT_DISPATCH(newton_schulz, params);
}

}  // namespace godwit::kernels
