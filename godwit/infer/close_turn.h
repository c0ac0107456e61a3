// The end of an assistant's turn that was cut off, by a limit or by its reader.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "godwit/text/chat_format.h"
#include "godwit/text/tokenizer.h"

namespace godwit {

// What is missing after `ids`, the turn's sampled tokens from behind its opened channel on: closing tags from
// the inside out, a response channel if there are only thoughts, the message's end. Fed to the model as they
// are, the next message can follow. `thinking`: the turn was opened in the think channel.
std::vector<ChatSegment> close_turn(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool thinking);

}  // namespace godwit
