#include "godwit/io/finite.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <mutex>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/parallel.h"
#include "godwit/io/mxfp4.h"

namespace godwit::io {
namespace {

constexpr int64_t kBlock = 1 << 16;  // elements looked at before the answer is asked for
constexpr size_t kShown = 10;

void add(int64_t at, NotFinite& found) {
  ++found.count;
  if (found.first.size() < kShown) found.first.push_back(at);
}

template <class Bits>
Bits load(const std::byte* data, int64_t i) {
  Bits bits;
  std::memcpy(&bits, data + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));  // need not be aligned
  return bits;
}

// Elements for which `bad` holds. A block is first asked as a whole, in a loop without branches; blocks that
// hold one are gone through once more.
template <class Bits, class Bad>
NotFinite scan(Bytes bytes, const Bad& bad) {
  const auto n = static_cast<int64_t>(bytes.size() / sizeof(Bits));
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  std::vector<int64_t> suspects;
  std::mutex mutex;
  parallel_for(0, blocks, 1, [&](int64_t from, int64_t to) {
    for (int64_t block = from; block < to; ++block) {
      unsigned any = 0;
      for (int64_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i)
        any |= static_cast<unsigned>(bad(load<Bits>(bytes.data(), i)));
      if (any == 0) continue;
      const std::lock_guard lock(mutex);
      suspects.push_back(block);
    }
  });
  std::ranges::sort(suspects);
  NotFinite found;
  for (const int64_t block : suspects) {
    for (int64_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i)
      if (bad(load<Bits>(bytes.data(), i))) add(i, found);
  }
  return found;
}

// "[3, 17]" of a flat index.
std::string place_text(int64_t index, std::span<const int64_t> shape) {
  std::vector<int64_t> place(shape.size());
  for (size_t d = shape.size(); d-- > 0;) place[d] = std::exchange(index, index / shape[d]) % shape[d];
  return shape_text(place);
}

}  // namespace

double finite_limit(Dtype to) {
  if (to == Dtype::BF16) return 0x1.ffp127;  // half a step above the largest: a tie goes to infinity
  if (to == Dtype::F16) return 65520;
  return std::numeric_limits<double>::infinity();
}

NotFinite find_not_finite(Bytes bytes, Dtype from, double limit) {
  // Every limit is a float, and an fp64 value is rounded to one first.
  const auto limit32 = static_cast<float>(limit);
  const auto bits32 = std::bit_cast<uint32_t>(limit32);
  switch (from) {
    case Dtype::F64:
      return scan<uint64_t>(bytes, [=](uint64_t bits) {
        return !(std::fabs(static_cast<float>(std::bit_cast<double>(bits))) < limit32);
      });
    case Dtype::F32:
      return scan<uint32_t>(bytes, [=](uint32_t bits) { return (bits & 0x7fffffff) >= bits32; });
    case Dtype::BF16:  // the upper half of a float
      return scan<uint16_t>(bytes, [least = (bits32 + 0xffff) >> 16](uint16_t bits) {
        return static_cast<uint32_t>(bits & 0x7fff) >= least;
      });
    case Dtype::F16:  // its largest, 65504, is below every limit
      return scan<uint16_t>(bytes, [](uint16_t bits) { return (bits & 0x7fff) >= 0x7c00; });
    default:
      fail("{} is no floating type", dtype_name(from));
  }
}

NotFinite find_not_finite_mxfp4(std::span<const uint8_t> packed, std::span<const uint8_t> scales) {
  constexpr uint8_t kSafe = 252;  // 6 * 2^125 is a float
  uint8_t largest = 0;
  for (const uint8_t scale : scales) largest = std::max(largest, scale);
  NotFinite found;
  if (largest <= kSafe) return found;
  for (size_t group = 0; group < scales.size(); ++group) {
    if (scales[group] <= kSafe) continue;
    for (int64_t i = 0; i < kMxfp4Group; ++i) {
      const int64_t at = static_cast<int64_t>(group) * kMxfp4Group + i;
      const uint8_t code = packed[at / 2] >> (at % 2 * 4);
      if (!std::isfinite(decode_e2m1(code) * decode_e8m0(scales[group]))) add(at, found);
    }
  }
  return found;
}

void check_finite(const NotFinite& found, std::string_view where, std::span<const int64_t> shape,
                  std::string_view as) {
  if (found.count == 0) return;
  int64_t total = 1;
  for (const int64_t size : shape) total *= size;
  std::vector<std::string> places;
  for (const int64_t at : found.first) places.push_back(place_text(at, shape));
  fail("{}: {} of {} values are not finite as {}: {}", where, found.count, total, as,
       first_ten(places, static_cast<size_t>(found.count)));
}

}  // namespace godwit::io
