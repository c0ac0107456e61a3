// wgmma of bf16 operands into fp32, 64 rows by N columns, for the widths that the expert products use. One
// macro line a width; W_LISTn are the PTX operand names %0 to %(4n-1), W_REGSn the registers behind them.
#pragma once

#include "godwit/kernels/cuda/sm90/ptx.cuh"

namespace godwit::kernels::cuda::sm90 {

// clang-format off
#define W_LIST1 "%0,%1,%2,%3"
#define W_LIST2 W_LIST1 "," "%4,%5,%6,%7"
#define W_LIST3 W_LIST2 "," "%8,%9,%10,%11"
#define W_LIST4 W_LIST3 "," "%12,%13,%14,%15"
#define W_LIST5 W_LIST4 "," "%16,%17,%18,%19"
#define W_LIST6 W_LIST5 "," "%20,%21,%22,%23"
#define W_LIST7 W_LIST6 "," "%24,%25,%26,%27"
#define W_LIST8 W_LIST7 "," "%28,%29,%30,%31"
#define W_LIST9 W_LIST8 "," "%32,%33,%34,%35"
#define W_LIST10 W_LIST9 "," "%36,%37,%38,%39"
#define W_LIST11 W_LIST10 "," "%40,%41,%42,%43"
#define W_LIST12 W_LIST11 "," "%44,%45,%46,%47"
#define W_LIST13 W_LIST12 "," "%48,%49,%50,%51"
#define W_LIST14 W_LIST13 "," "%52,%53,%54,%55"
#define W_LIST15 W_LIST14 "," "%56,%57,%58,%59"
#define W_LIST16 W_LIST15 "," "%60,%61,%62,%63"
#define W_LIST17 W_LIST16 "," "%64,%65,%66,%67"
#define W_LIST18 W_LIST17 "," "%68,%69,%70,%71"
#define W_LIST19 W_LIST18 "," "%72,%73,%74,%75"
#define W_LIST20 W_LIST19 "," "%76,%77,%78,%79"
#define W_LIST21 W_LIST20 "," "%80,%81,%82,%83"
#define W_LIST22 W_LIST21 "," "%84,%85,%86,%87"
#define W_LIST23 W_LIST22 "," "%88,%89,%90,%91"
#define W_LIST24 W_LIST23 "," "%92,%93,%94,%95"
#define W_REGS1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define W_REGS2 W_REGS1, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define W_REGS3 W_REGS2, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define W_REGS4 W_REGS3, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define W_REGS5 W_REGS4, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define W_REGS6 W_REGS5, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define W_REGS7 W_REGS6, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define W_REGS8 W_REGS7, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define W_REGS9 W_REGS8, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define W_REGS10 W_REGS9, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define W_REGS11 W_REGS10, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define W_REGS12 W_REGS11, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define W_REGS13 W_REGS12, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define W_REGS14 W_REGS13, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define W_REGS15 W_REGS14, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define W_REGS16 W_REGS15, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define W_REGS17 W_REGS16, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define W_REGS18 W_REGS17, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define W_REGS19 W_REGS18, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define W_REGS20 W_REGS19, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define W_REGS21 W_REGS20, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define W_REGS22 W_REGS21, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define W_REGS23 W_REGS22, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define W_REGS24 W_REGS23, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
// clang-format on

// d += A B^T. smem: A and B by descriptor; A is stored [rows][k] (kTransA = 0) or [k][rows] (1), B
// [columns][k] (0) or [k][columns] (1). regs: A as m16n8k16 row fragments, one a warp; B [columns][k].
template <int N>
struct Wgmma;

#define W_WIDTH(N, G, I0, I1, I2, I3, I4)                                                                \
  template <>                                                                                            \
  struct Wgmma<N> {                                                                                      \
    template <int kTransA, int kTransB>                                                                  \
    static __device__ __forceinline__ void smem(float (&d)[N / 2], uint64_t a, uint64_t b) {             \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" W_LIST##G                \
                   "}, %" #I0 ", %" #I1 ", 1, 1, 1, %" #I2 ", %" #I3 ";"                                 \
                   : W_REGS##G                                                                           \
                   : "l"(a), "l"(b), "n"(kTransA), "n"(kTransB));                                        \
    }                                                                                                    \
    static __device__ __forceinline__ void regs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) { \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" W_LIST##G                \
                   "}, {%" #I0 ", %" #I1 ", %" #I2 ", %" #I3 "}, %" #I4 ", 1, 1, 1, 0;"                  \
                   : W_REGS##G                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
    }                                                                                                    \
  };

W_WIDTH(8, 1, 4, 5, 6, 7, 8)
W_WIDTH(16, 2, 8, 9, 10, 11, 12)
W_WIDTH(32, 4, 16, 17, 18, 19, 20)
W_WIDTH(48, 6, 24, 25, 26, 27, 28)
W_WIDTH(64, 8, 32, 33, 34, 35, 36)
W_WIDTH(96, 12, 48, 49, 50, 51, 52)
W_WIDTH(112, 14, 56, 57, 58, 59, 60)
W_WIDTH(128, 16, 64, 65, 66, 67, 68)
W_WIDTH(144, 18, 72, 73, 74, 75, 76)
W_WIDTH(152, 19, 76, 77, 78, 79, 80)
W_WIDTH(160, 20, 80, 81, 82, 83, 84)
W_WIDTH(168, 21, 84, 85, 86, 87, 88)
W_WIDTH(176, 22, 88, 89, 90, 91, 92)
W_WIDTH(192, 24, 96, 97, 98, 99, 100)

#undef W_WIDTH

// Zeros that are made here and nowhere else: the compiler, left to itself, keeps those of all widths of a
// kernel in registers at once.
template <int kCount>
__device__ __forceinline__ void clear(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(d[i]));
}

// Keeps the compiler from moving uses of registers that a wgmma still owns across a fence or wait.
template <int kCount>
__device__ __forceinline__ void pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

}  // namespace godwit::kernels::cuda::sm90
