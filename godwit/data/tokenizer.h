// A Tokenizer as packing and training see it.
#pragma once

#include <string>

#include "godwit/data/documents.h"
#include "godwit/data/pack.h"
#include "godwit/text/tokenizer.h"

namespace godwit::data {

// Of all tokens and special names: equal for equal ids of every text. Stands in the manifest of packed data.
std::string tokenizer_hash(const Tokenizer& tokenizer);

// [EOS] ends every document; nothing stands before it, as in K3's chat format. `processor`: how pictures are
// cut into tokens. `tokenizer` must outlive the result.
PackTokenizer pack_tokenizer(const Tokenizer& tokenizer, const io::ImageProcessorConfig& processor = {});

}  // namespace godwit::data
