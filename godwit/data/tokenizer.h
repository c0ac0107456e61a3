// A Tokenizer as packing and training see it.
#pragma once

#include <string>

#include "godwit/data/documents.h"
#include "godwit/data/pack.h"
#include "godwit/text/tokenizer.h"

namespace godwit::data {

// Of all tokens and special names: equal for equal ids of every text. Stands in the manifest of packed data.
std::string tokenizer_hash(const Tokenizer& tokenizer);

// A conversation {"messages": [...], "tools": [...], ...} of OpenAI's form (text/chat_json.h) in K3's chat
// format; the loss sees what the assistant wrote, markup of its turn included. Errors begin with `where`.
ChatSample chat_sample(const Tokenizer& tokenizer, std::string_view line, const std::string& where);

// What a tokenizer learns from: a text itself; of a conversation everything but the special tokens, each of
// which is a line's end here.
std::string plain_text(const Document& document);

// [EOS] ends every document; nothing stands before it, as in K3's chat format. `tokenizer` must outlive the
// result.
PackTokenizer pack_tokenizer(const Tokenizer& tokenizer);

}  // namespace godwit::data
