// Every tolerance of the tests, relative to the largest entry of the expected tensor (see close()), with its
// reason. They are not raised to pass.
#pragma once

namespace godwit::test {

inline constexpr double kFp32 = 2e-6;              // one op in fp32 against fp64: sums of up to 1e3 products
inline constexpr double kFp32Chain = 2e-5;         // several ops, or a recurrence over hundreds of tokens
inline constexpr double kFp32Model = 1e-4;         // a whole model with weights ten times the usual scale
inline constexpr double kFp32Grad = 2e-5;          // gradients: twice the sums, cancellation
inline constexpr double kFp64 = 1e-10;             // two orders of the same fp64 arithmetic
inline constexpr double kFiniteDiff = 1e-6;        // central differences in fp64, step 1e-6
inline constexpr double kBf16 = 1e-2;              // inputs and outputs rounded to bf16 (4e-3), sums in fp32
inline constexpr double kFp32Transformers = 1e-5;  // a whole small model, both sides in fp32
// Relative to the norm of the expected tensor (see close_norm()): bf16 operands between fp32 sums.
inline constexpr double kBf16Chain = 8e-3;  // a few products deep
inline constexpr double kBf16Grad = 2e-2;   // more of them, and gate gradients are differences of large terms

}  // namespace godwit::test
