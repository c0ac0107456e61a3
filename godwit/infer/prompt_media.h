// The pictures of one prompt while it is read: where their placeholders stand, what they are called in the
// prefix cache, and their vectors, made when the prompt's reading comes to them.
//
// How a caller makes a request with pictures (the server, `generate`, `chat`):
//   MediaList media = read_images(model, messages, bytes_of);   fills in size and tokens of every image part
//   request.prompt = encode_chat(render_chat(messages, options), model.tokenizer).ids;
//   request.media = media;                                      in the order of the prompt
// The engine runs the tower on its own thread. Pictures whose placeholders were in the prefix cache are not
// encoded again; another picture of the same size has another key.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "godwit/infer/model.h"
#include "godwit/model/media.h"
#include "godwit/text/chat_format.h"

namespace godwit {

// The picture in `file` (JPEG, PNG or WebP) for the model. Error, in one line that begins with `where`, for
// one that cannot be read, or when the model has no vision tower. May be called from any thread.
std::shared_ptr<const MediaItem> read_image(const LoadedModel& model, std::string_view file,
                                            const std::string& where);

// Every image of the messages, in order; their parts get size and tokens. `bytes_of` gives the encoded
// picture behind an image_url.
MediaList read_images(
    const LoadedModel& model, std::span<ChatMessage> messages,
    const std::function<std::string(const std::string& url, const std::string& where)>& bytes_of);

class PromptMedia {
 public:
  // Throws Error when the prompt's <|media_pad|> tokens are not as many as the items stand for.
  PromptMedia(const LoadedModel& model, std::span<const int32_t> prompt, MediaList items);

  // What the prefix cache compares: the token's id, or at a placeholder a negative number from the picture.
  const std::vector<int64_t>& keys() const { return keys_; }

  // Vectors [n, D] of the placeholders among the prompt's tokens from .. to; undefined if there are none.
  at::Tensor vectors(int64_t from, int64_t to);

 private:
  const LoadedModel& model_;
  MediaList items_;
  std::vector<int64_t> places_;   // of the placeholders in the prompt
  std::vector<int64_t> first_;    // [items + 1] placeholder of each item
  std::vector<at::Tensor> made_;  // vectors of each item, as far as they were asked for
  std::vector<int64_t> keys_;
};

}  // namespace godwit
