// Documents from files.
//   NAME.jsonl, NAME.jsonl.zst   each line is one document: {"text": ...}, or the conversation
//                                {"messages": [...], "tools": [...], ...}, or text with pictures
//                                {"content": [...]} (sample.h); other keys are ignored
//   NAME.tar                     samples in the WebDataset manner: members KEY.EXTENSION one after another;
//                                KEY.json is such an object that names the other members by their extensions
//                                ("image": "png"), KEY.txt the caption of the pictures beside it
//   any other file, or .zst      text; a line that holds only a form feed ("\f") separates documents,
//   otherwise one document a directory                  every file below it in the order of the paths; hidden
//   files and files with a NUL in their first
//                                8 KiB are passed over
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "godwit/io/file.h"

namespace godwit::data {

namespace fs = std::filesystem;

// The files behind the given files and directories. An absent one is an Error.
std::vector<fs::path> list_inputs(std::span<const fs::path> inputs);

struct Document {
  std::string_view text;    // or a JSON object (sample.h)
  bool chat = false;        // the second
  std::string where = {};   // of an object: FILE:LINE
  fs::path directory = {};  // of an object: where the paths in it begin
  // Of an object from an archive: the sample's other members by their extensions.
  std::shared_ptr<const std::map<std::string, std::string>> members = {};
};

// Calls `visit(document, consumed)` for each document of a file, `consumed` being the bytes of the file read
// so far. Empty documents are visited too. The text is valid during the call.
using DocumentFn = std::function<void(const Document& document, uint64_t consumed)>;
void read_documents(const fs::path& file, const DocumentFn& visit);

}  // namespace godwit::data
