// What a stored tensor is: name, element type, shape. No tensor library here.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace godwit::io {

// The element types of a safetensors file, by their names in its header.
enum class Dtype : uint8_t {
  F64,
  F32,
  F16,
  BF16,
  I64,
  I32,
  I16,
  I8,
  U64,
  U32,
  U16,
  U8,
  BOOL,
  F8_E4M3,
  F8_E5M2,
  F8_E8M0
};

std::string_view dtype_name(Dtype dtype);
int64_t dtype_size(Dtype dtype);  // bytes of one element
std::optional<Dtype> parse_dtype(std::string_view name);

struct TensorSpec {
  std::string name;
  Dtype dtype = Dtype::F32;
  std::vector<int64_t> shape;  // empty for a scalar; a zero anywhere means no bytes

  bool operator==(const TensorSpec&) const = default;
};

// Bytes of the tensor; none if a dimension is negative or the product does not fit in 63 bits.
std::optional<uint64_t> tensor_bytes(Dtype dtype, std::span<const int64_t> shape);
// The same; an impossible shape is an Error that begins with `where`.
uint64_t checked_tensor_bytes(const TensorSpec& spec, std::string_view where);

std::string shape_text(std::span<const int64_t> shape);  // "[3072, 1792]"

// A name that can stand in a file and in an error line: 1 to 1024 bytes, no control characters.
bool is_sane_tensor_name(std::string_view name);

// The first ten of `items` as "a, b, c", with ", ..." if `count` says that there are more.
std::string first_ten(std::span<const std::string> items, size_t count);

// One kind of fault in a long list: how many cases there are, and the first ten in words.
class CaseList {
 public:
  void add(std::string text) {
    if (count_++ < 10) first_.push_back(std::move(text));
  }
  bool empty() const { return count_ == 0; }
  int64_t count() const { return count_; }
  // Adds "3 missing: a, b, c" to `out`, after `separator` if that is not empty. Nothing without a case.
  void print(std::string_view kind, std::string_view separator, std::string& out) const;

 private:
  int64_t count_ = 0;
  std::vector<std::string> first_;
};

// What differs between the tensors a model wants and those a checkpoint has.
struct SpecDifferences {
  int64_t missing = 0;
  int64_t unexpected = 0;
  int64_t misshapen = 0;
  int64_t wrong_dtype = 0;
  std::string text;  // of each kind the count and the first ten, in the order of names; one line each

  bool none() const { return missing + unexpected + misshapen + wrong_dtype == 0; }
};

enum class DtypeCheck { kExact, kIgnore };
SpecDifferences compare_specs(std::span<const TensorSpec> expected, std::span<const TensorSpec> found,
                              DtypeCheck dtypes);

}  // namespace godwit::io
