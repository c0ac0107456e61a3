#include "godwit/kernels/cpu/dispatch/isa.h"

#include <cstdlib>
#include <string_view>

#include "godwit/base/check.h"

namespace godwit::kernels {
namespace {

Isa detect() {
  check(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
        "the CPU kernels need AVX2 and FMA, which this processor lacks");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const char* forced = std::getenv("GODWIT_CPU_ISA");
  if (forced == nullptr || *forced == '\0') return has_avx512 ? Isa::kAvx512 : Isa::kAvx2;
  const std::string_view name = forced;
  if (name == "avx2") return Isa::kAvx2;
  check(name == "avx512", "GODWIT_CPU_ISA: expected avx2 or avx512, got '{}'", name);
  check(has_avx512, "GODWIT_CPU_ISA=avx512, but this processor has no AVX-512 (F, BW, DQ, VL)");
  return Isa::kAvx512;
}

}  // namespace

Isa cpu_isa() {
  static const Isa isa = detect();
  return isa;
}

}  // namespace godwit::kernels
