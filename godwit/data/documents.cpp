#include "godwit/data/documents.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/data/tar.h"
#include "godwit/io/jsonl.h"

namespace godwit::data {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // no part of the text

bool is_jsonl(const fs::path& file) {
  const fs::path name = file.extension() == ".zst" ? file.stem() : file.filename();
  return name.extension() == ".jsonl";
}

bool is_tar(const fs::path& file) {
  return file.extension() == ".tar";
}

// One sample of an archive: its members by extension ("png", "0.png").
using Members = std::map<std::string, std::string>;

bool is_picture_name(const std::string& extension) {
  std::string last = extension.substr(extension.rfind('.') + 1);
  std::ranges::transform(last, last.begin(), [](unsigned char c) { return std::tolower(c); });
  return last == "png" || last == "jpg" || last == "jpeg" || last == "webp";
}

// KEY.txt with the pictures beside it, in the order of their extensions, as an object of JSON. Other members,
// as a class in KEY.cls, are no part of it.
std::string caption_json(const Members& members) {
  nlohmann::json content = nlohmann::json::array();
  for (const auto& [extension, bytes] : members) {
    if (is_picture_name(extension)) content.push_back({{"type", "image"}, {"image", extension}});
  }
  content.push_back({{"type", "text"}, {"text", members.at("txt")}});
  try {
    return nlohmann::json{{"content", content}}.dump();
  } catch (const nlohmann::json::exception&) {
    return {};  // not UTF-8
  }
}

void read_samples(const fs::path& file, const DocumentFn& visit) {
  std::string key;
  Members members;
  const auto finish = [&](uint64_t consumed) {
    if (members.empty()) return;
    const std::string where = file.string() + ":" + key;
    const auto json = members.find("json");
    check(json != members.end() || members.contains("txt"), "{}: the sample has no .json and no .txt", where);
    const std::string text = json != members.end() ? json->second : caption_json(members);
    check(!text.empty(), "{}: the text is empty or not UTF-8", where);
    io::check_nesting(text, where);
    const auto shared = std::make_shared<const Members>(std::move(members));
    members.clear();
    visit({.text = text, .chat = true, .where = where, .directory = {}, .members = shared}, consumed);
  };
  uint64_t end = 0;
  read_tar(file, [&](const std::string& name, io::Bytes bytes, uint64_t consumed) {
    // The key goes to the first dot of the file's name; directories belong to it.
    const size_t slash = name.rfind('/') == std::string::npos ? 0 : name.rfind('/') + 1;
    const size_t dot = name.find('.', slash);
    if (dot == std::string::npos || dot == slash) return;
    if (name.compare(0, dot, key) != 0 || key.size() != dot) finish(end);
    key = name.substr(0, dot);
    members[name.substr(dot + 1)] = std::string(io::as_text(bytes));
    end = consumed;
  });
  finish(end);
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
    } else if (it->is_regular_file() && !it->is_symlink() && (is_tar(it->path()) || !is_binary(it->path()))) {
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
  if (is_tar(file)) return read_samples(file, visit);
  if (is_jsonl(file)) {
    io::JsonlReader reader(file);
    nlohmann::json value;
    while (reader.next(value)) {
      if (value.is_object() && (value.contains("messages") || value.contains("content"))) {
        visit({.text = reader.line(), .chat = true, .where = reader.where(), .directory = file.parent_path()},
              reader.consumed());
      } else {
        const std::string text = io::json_text(value, "text", reader.where());
        visit({.text = text, .where = reader.where()}, reader.consumed());
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
