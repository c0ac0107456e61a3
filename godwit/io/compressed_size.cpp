#include "godwit/io/compressed_size.h"

#include <zstd.h>

#include <string>

#include "godwit/base/check.h"

namespace godwit::io {

uint64_t zstd_size(std::string_view text, int level) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  const size_t size = ZSTD_compress(out.data(), out.size(), text.data(), text.size(), level);
  check(!ZSTD_isError(size), "zstd: {}", ZSTD_getErrorName(size));
  return size;
}

}  // namespace godwit::io
