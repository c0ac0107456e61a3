// The tensors of python/make_safetensors_fixtures.py: the same names, types, shapes and bytes.
#pragma once

#include <string>
#include <vector>

#include "godwit/io/safetensors.h"

namespace godwit::io {

inline std::vector<TensorSpec> fixture_tensors() {
  return {{"f64", Dtype::F64, {2, 3}},      {"f32", Dtype::F32, {5}},
          {"f16", Dtype::F16, {3, 1, 2}},   {"bf16", Dtype::BF16, {7}},
          {"i64", Dtype::I64, {2}},         {"i32", Dtype::I32, {3}},
          {"i16", Dtype::I16, {5}},         {"i8", Dtype::I8, {9}},
          {"u64", Dtype::U64, {1}},         {"u32", Dtype::U32, {3}},
          {"u16", Dtype::U16, {3}},         {"u8", Dtype::U8, {3, 5}},
          {"bool", Dtype::BOOL, {6}},       {"f8_e4m3", Dtype::F8_E4M3, {11}},
          {"f8_e5m2", Dtype::F8_E5M2, {4}}, {"f8_e8m0", Dtype::F8_E8M0, {4}},
          {"scalar", Dtype::F32, {}},       {"empty", Dtype::F32, {3, 0, 2}},
          {"größe.層", Dtype::U8, {4}}};
}

inline const Metadata kFixtureMetadata{{"format", "pt"}, {"note", "quotes \" and \\ and ü"}};

inline std::string fixture_bytes(size_t number) {
  const TensorSpec spec = fixture_tensors()[number];
  std::string bytes;
  for (size_t i = 0; i < *tensor_bytes(spec.dtype, spec.shape); ++i) {
    const size_t value = (7 * i + 13 * number) % 251;
    bytes += static_cast<char>(spec.dtype == Dtype::BOOL ? value % 2 : value);
  }
  return bytes;
}

}  // namespace godwit::io
