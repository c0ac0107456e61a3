#include "godwit/data/tokenizer.h"

#include <span>

#include "godwit/io/checksum.h"

namespace godwit::data {

std::string tokenizer_hash(const Tokenizer& tokenizer) {
  io::Xxh3 hash;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string_view bytes = tokenizer.token_bytes(id);
    const auto length = static_cast<uint32_t>(bytes.size());
    hash.update(std::as_bytes(std::span(&length, 1)));
    hash.update(io::as_bytes(bytes));
  }
  return io::hex64(hash.digest());
}

PackTokenizer pack_tokenizer(const Tokenizer& tokenizer, const io::ImageProcessorConfig& processor) {
  return {.encode = [&tokenizer](std::string_view text,
                                 std::vector<int32_t>& ids) { tokenizer.encode_append(text, ids); },
          .encode_chat =
              [&tokenizer, processor](const Document& document) {
                return document_sample(tokenizer, processor, document);
              },
          .vocab_size = tokenizer.vocab_size(),
          .eos_id = tokenizer.special_id(kEos),
          .bos_id = {},
          .hash = tokenizer_hash(tokenizer)};
}

}  // namespace godwit::data
