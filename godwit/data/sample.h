// Documents of JSON as tokens: conversations, and text with pictures and videos in it.
//
//   {"messages": [...], "tools": [...], ...}     OpenAI's form, in K3's chat format; the loss sees what an
//                                                assistant wrote, the markup of its turn included
//   {"content": [PART, ...], "answer": "..."}    parts one after another; the loss sees the text, or with an
//                                                answer that alone, and the end
// PART is {"type": "text", "text": ...}, {"type": "image", "image": PICTURE}, {"type": "image_url",
// "image_url":
// {"url": PICTURE}} or {"type": "video", "video": [PICTURE, ...] | DIRECTORY | ANIMATION, "fps": 8}. PICTURE
// is a member of the document's archive, a data URL, or a path from the file's directory.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "godwit/data/documents.h"
#include "godwit/data/media_file.h"
#include "godwit/io/image_processor.h"
#include "godwit/text/tokenizer.h"

namespace godwit::data {

struct ChatSample {
  std::vector<int32_t> ids;
  std::vector<uint8_t> trained;        // one for each id: whether the loss sees it
  std::string trained_text;            // the text behind those
  bool end_trained = false;            // whether the loss sees the [EOS] after it
  std::vector<MediaEntry> media = {};  // in the order of their placeholders
};

// Errors begin with where the document stands.
ChatSample document_sample(const Tokenizer& tokenizer, const io::ImageProcessorConfig& processor,
                           const Document& document);
// The same for a line that stands alone, with the released picture settings.
ChatSample chat_sample(const Tokenizer& tokenizer, std::string_view line, const std::string& where);

// What a tokenizer learns from: a text itself; of a document of JSON everything but the special tokens, each
// of which is a line's end here, and a size for every picture.
std::string plain_text(const Document& document);

// The encoded picture that `source` names in a document.
std::string picture_bytes(const Document& document, const std::string& source, const std::string& where);

}  // namespace godwit::data
