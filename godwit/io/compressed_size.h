// What a general compressor makes of some bytes: the yardstick beside a language model's bits per byte.
#pragma once

#include <cstdint>
#include <string_view>

namespace godwit::io {

// Bytes after zstd at `level` (1 to 22), the whole text as one frame.
uint64_t zstd_size(std::string_view text, int level);

}  // namespace godwit::io
