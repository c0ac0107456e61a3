#include "godwit/io/tensor_spec.h"

#include <algorithm>
#include <array>

#include "godwit/base/check.h"

namespace godwit::io {
namespace {

struct DtypeRow {
  Dtype dtype;
  std::string_view name;
  int64_t size;
};

// In the order of the enumeration.
constexpr std::array<DtypeRow, 16> kDtypes{{
    {Dtype::F64, "F64", 8},
    {Dtype::F32, "F32", 4},
    {Dtype::F16, "F16", 2},
    {Dtype::BF16, "BF16", 2},
    {Dtype::I64, "I64", 8},
    {Dtype::I32, "I32", 4},
    {Dtype::I16, "I16", 2},
    {Dtype::I8, "I8", 1},
    {Dtype::U64, "U64", 8},
    {Dtype::U32, "U32", 4},
    {Dtype::U16, "U16", 2},
    {Dtype::U8, "U8", 1},
    {Dtype::BOOL, "BOOL", 1},
    {Dtype::F8_E4M3, "F8_E4M3", 1},
    {Dtype::F8_E5M2, "F8_E5M2", 1},
    {Dtype::F8_E8M0, "F8_E8M0", 1},
}};

constexpr bool rows_in_order() {
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i].dtype != static_cast<Dtype>(i)) return false;
  }
  return true;
}
static_assert(rows_in_order());

const DtypeRow& row(Dtype dtype) {
  return kDtypes[static_cast<size_t>(dtype)];
}

std::vector<const TensorSpec*> sorted_by_name(std::span<const TensorSpec> specs) {
  std::vector<const TensorSpec*> sorted;
  sorted.reserve(specs.size());
  for (const auto& spec : specs) sorted.push_back(&spec);
  std::ranges::sort(sorted, {}, [](const TensorSpec* spec) -> const std::string& { return spec->name; });
  return sorted;
}

}  // namespace

std::string_view dtype_name(Dtype dtype) {
  return row(dtype).name;
}
int64_t dtype_size(Dtype dtype) {
  return row(dtype).size;
}

std::optional<Dtype> parse_dtype(std::string_view name) {
  for (const auto& row : kDtypes) {
    if (row.name == name) return row.dtype;
  }
  return std::nullopt;
}

std::optional<uint64_t> tensor_bytes(Dtype dtype, std::span<const int64_t> shape) {
  int64_t bytes = dtype_size(dtype);
  bool overflow = false;
  for (const int64_t dim : shape) {
    if (dim < 0) return std::nullopt;
    if (dim == 0) return 0;
  }
  for (const int64_t dim : shape) overflow |= __builtin_mul_overflow(bytes, dim, &bytes);
  if (overflow) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

uint64_t checked_tensor_bytes(const TensorSpec& spec, std::string_view where) {
  const auto bytes = tensor_bytes(spec.dtype, spec.shape);
  check(bytes.has_value(), "{}: tensor '{}' has the impossible shape {}", where, spec.name,
        shape_text(spec.shape));
  return *bytes;
}

void CaseList::print(std::string_view kind, std::string_view separator, std::string& out) const {
  if (count_ == 0) return;
  if (!out.empty()) out += separator;
  out += fmt::format("{} {}: {}", count_, kind, first_ten(first_, static_cast<size_t>(count_)));
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (const int64_t dim : shape) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", dim);
  return text + ']';
}

std::string first_ten(std::span<const std::string> items, size_t count) {
  std::string text;
  const size_t shown = std::min<size_t>(items.size(), 10);
  for (size_t i = 0; i < shown; ++i) text += (i > 0 ? ", " : "") + items[i];
  return count > shown ? text + ", ..." : text;
}

bool is_sane_tensor_name(std::string_view name) {
  return !name.empty() && name.size() <= 1024 &&
         std::ranges::none_of(name, [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; });
}

SpecDifferences compare_specs(std::span<const TensorSpec> expected, std::span<const TensorSpec> found,
                              DtypeCheck dtypes) {
  const auto wants = sorted_by_name(expected);
  const auto has = sorted_by_name(found);
  CaseList missing, unexpected, misshapen, wrong_dtype;
  size_t w = 0, h = 0;
  while (w < wants.size() || h < has.size()) {
    const int order = w == wants.size() ? 1 : h == has.size() ? -1 : wants[w]->name.compare(has[h]->name);
    if (order < 0) {
      missing.add(fmt::format("{} {}", wants[w]->name, shape_text(wants[w]->shape)));
      ++w;
      continue;
    }
    if (order > 0) {
      unexpected.add(fmt::format("{} {}", has[h]->name, shape_text(has[h]->shape)));
      ++h;
      continue;
    }
    const TensorSpec& want = *wants[w++];
    const TensorSpec& have = *has[h++];
    if (want.shape != have.shape) {
      misshapen.add(
          fmt::format("{} {} instead of {}", want.name, shape_text(have.shape), shape_text(want.shape)));
    } else if (dtypes == DtypeCheck::kExact && want.dtype != have.dtype) {
      wrong_dtype.add(
          fmt::format("{} {} instead of {}", want.name, dtype_name(have.dtype), dtype_name(want.dtype)));
    }
  }
  SpecDifferences result{missing.count(), unexpected.count(), misshapen.count(), wrong_dtype.count(), {}};
  missing.print("missing", "\n", result.text);
  unexpected.print("unexpected", "\n", result.text);
  misshapen.print("of another shape", "\n", result.text);
  wrong_dtype.print("of another type", "\n", result.text);
  return result;
}

}  // namespace godwit::io
