// Which instruction set the CPU kernels use, chosen once at start: AVX-512 where the processor has F, BW, DQ
// and VL, else AVX2 with FMA. GODWIT_CPU_ISA=avx2 in the environment forces the narrower one (tests run
// both).
#pragma once

namespace godwit::kernels {

enum class Isa { kAvx2, kAvx512 };

// Throws Error on a processor without AVX2 and FMA.
Isa cpu_isa();

}  // namespace godwit::kernels

// Calls kernels::<isa>::fn(args...).
#define GODWIT_DISPATCH(fn, ...)                                                             \
  (::godwit::kernels::cpu_isa() == ::godwit::kernels::Isa::kAvx512 ? avx512::fn(__VA_ARGS__) \
                                                                   : avx2::fn(__VA_ARGS__))
