// Documents from files.
//   NAME.jsonl, NAME.jsonl.zst   each line is one document: {"text": ...}, or the conversation
//                                {"messages": [...], "tools": [...], ...}; other keys are ignored
//   any other file, or .zst      text; a line that holds only a form feed ("\f") separates documents,
//   otherwise one document a directory                  every file below it in the order of the paths; hidden
//   files and files with a NUL in their first
//                                8 KiB are passed over
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"

namespace godwit::data {

namespace fs = std::filesystem;

// The files behind the given files and directories. An absent one is an Error.
std::vector<fs::path> list_inputs(std::span<const fs::path> inputs);

struct Document {
  std::string_view text;  // of a conversation: its line, a JSON object
  bool chat = false;
  std::string where = {};  // of a conversation: FILE:LINE
};

// Calls `visit(document, consumed)` for each document of a file, `consumed` being the bytes of the file read
// so far. Empty documents are visited too. The text is valid during the call.
using DocumentFn = std::function<void(const Document& document, uint64_t consumed)>;
void read_documents(const fs::path& file, const DocumentFn& visit);

}  // namespace godwit::data
