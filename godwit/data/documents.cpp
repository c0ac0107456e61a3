#include "godwit/data/documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/io/jsonl.h"

namespace godwit::data {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // no part of the text

bool is_jsonl(const fs::path& file) {
  const fs::path name = file.extension() == ".zst" ? file.stem() : file.filename();
  return name.extension() == ".jsonl";
}

bool is_binary(const fs::path& file) {
  io::TextSource source(file);
  std::string head(8192, ' ');
  head.resize(source.read(head.data(), head.size()));
  return head.find('\0') != std::string::npos;
}

bool is_hidden(const fs::path& path) {
  return path.filename().string().starts_with('.');
}

void list_directory(const fs::path& directory, std::vector<fs::path>& files) {
  std::vector<fs::path> found;
  auto it = fs::recursive_directory_iterator(directory);
  for (; it != fs::recursive_directory_iterator(); ++it) {
    if (is_hidden(it->path())) {
      if (it->is_directory()) it.disable_recursion_pending();
    } else if (it->is_regular_file() && !it->is_symlink() && !is_binary(it->path())) {
      found.push_back(it->path());
    }
  }
  std::ranges::sort(found);
  files.insert(files.end(), found.begin(), found.end());
}

bool is_separator(std::string_view line) {
  return line == "\f\n" || line == "\f\r\n" || line == "\f";
}

}  // namespace

std::vector<fs::path> list_inputs(std::span<const fs::path> inputs) {
  std::vector<fs::path> files;
  for (const auto& input : inputs) {
    std::error_code error;
    check(fs::exists(input, error), "no such file or directory: {}", input.string());
    if (fs::is_directory(input, error)) {
      list_directory(input, files);
    } else {
      files.push_back(input);
    }
  }
  return files;
}

void read_documents(const fs::path& file, const DocumentFn& visit) {
  if (is_jsonl(file)) {
    io::JsonlReader reader(file);
    nlohmann::json value;
    while (reader.next(value)) {
      if (value.is_object() && value.contains("messages")) {
        visit({.text = reader.line(), .chat = true, .where = reader.where()}, reader.consumed());
      } else {
        const std::string text = io::json_text(value, "text", reader.where());
        visit({.text = text}, reader.consumed());
      }
    }
    return;
  }
  io::LineReader reader(file);
  std::string text;
  bool first = true;
  while (auto line = reader.next()) {
    if (std::exchange(first, false) && line->starts_with(kByteOrderMark))
      line->remove_prefix(kByteOrderMark.size());
    if (!is_separator(*line)) {
      text += *line;
      continue;
    }
    visit({.text = text}, reader.consumed());
    text.clear();
  }
  visit({.text = text}, reader.consumed());
}

}  // namespace godwit::data
