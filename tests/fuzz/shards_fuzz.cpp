// data/token_shard: any bytes as a shard, or as a manifest. The first byte chooses: a shard as it is, a shard
// whose checksums are put right (so that what lies behind them is reached), a manifest.
#include <array>
#include <cstring>

#include "godwit/data/token_shard.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace godwit;

// The header's two checksums, at 48 and 56 of its 64 bytes.
void put_right(std::string& shard) {
  if (shard.size() < 64) return;
  const auto sum = [&](size_t begin, size_t end) {
    return io::xxh3(std::as_bytes(std::span(shard)).subspan(begin, end - begin));
  };
  const uint64_t body = sum(64, shard.size());
  std::memcpy(shard.data() + 48, &body, 8);
  const uint64_t header = sum(0, 56);
  std::memcpy(shard.data() + 56, &header, 8);
}

void read_shard(const std::filesystem::path& path) {
  const data::TokenShard shard(path);
  std::array<int64_t, 16> out{};
  for (uint64_t d = 0; d < shard.documents(); ++d) {
    const uint64_t n = std::min<uint64_t>(shard.document_tokens(d), out.size());
    shard.copy_tokens(d, shard.document_tokens(d) - n, std::span(out).first(n));
    for (uint64_t i = 0; i < n; ++i) fuzz::require(out[i] >= 0 && out[i] < shard.vocab_size());
  }
  shard.verify();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string content(fuzz::text(data + 1, size - 1));
  if (data[0] % 3 == 2) {
    fuzz::as_file("manifest.json", content);
    fuzz::accepts([&] { data::read_manifest(fuzz::scratch()); });
    return 0;
  }
  if (data[0] % 3 == 1) put_right(content);
  const auto path = fuzz::as_file("shard-00000.gwt", content);
  fuzz::accepts([&] { read_shard(path); });
  return 0;
}
