#include "godwit/infer/close_turn.h"

#include <string>
#include <string_view>

namespace godwit {
namespace {

// The tags that are open after some tokens of a turn, outermost first; the message's own is not among them.
class OpenTags {
 public:
  OpenTags(const Tokenizer& tokenizer, bool thinking)
      : tokenizer_(tokenizer),
        open_(tokenizer.special_id(kOpen)),
        close_(tokenizer.special_id(kClose)),
        sep_(tokenizer.special_id(kSep)),
        tags_{thinking ? "think" : "response"},
        only_thoughts_(thinking) {}

  void push(int32_t id) {
    if (id == open_ || id == close_) {
      header_ = id == open_ ? Header::kOpen : Header::kClose;
      name_.clear();
    } else if (id == sep_) {
      end_header();
    } else if (header_ != Header::kNone) {
      name_ += tokenizer_.token_bytes(id);
    }
  }
  // Ends a header that was cut; true if there was one.
  bool end_header() {
    if (header_ == Header::kNone) return false;
    if (header_ == Header::kOpen) {
      tags_.push_back(name_.substr(0, name_.find(' ')));
      only_thoughts_ = false;
    } else if (!tags_.empty()) {
      tags_.pop_back();
    }
    header_ = Header::kNone;
    return true;
  }

  const std::vector<std::string>& tags() const { return tags_; }
  bool only_thoughts() const { return only_thoughts_; }

 private:
  enum class Header { kNone, kOpen, kClose };

  const Tokenizer& tokenizer_;
  int32_t open_, close_, sep_;
  std::vector<std::string> tags_;
  bool only_thoughts_;
  Header header_ = Header::kNone;
  std::string name_;
};

void add_control(std::string_view token, std::vector<ChatSegment>& out) {
  ChatSegment& segment = out.emplace_back();
  segment.text = token;
  segment.control = true;
}

void add_tag(std::string_view kind, const std::string& tag, std::vector<ChatSegment>& out) {
  add_control(kind, out);
  out.emplace_back().text = tag;
  add_control(kSep, out);
}

}  // namespace

std::vector<ChatSegment> close_turn(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool thinking) {
  OpenTags open(tokenizer, thinking);
  for (const int32_t id : ids) open.push(id);
  std::vector<ChatSegment> out;
  if (open.end_header()) add_control(kSep, out);
  for (auto tag = open.tags().rbegin(); tag != open.tags().rend(); ++tag) add_tag(kClose, *tag, out);
  if (open.only_thoughts()) {
    add_tag(kOpen, "response", out);
    add_tag(kClose, "response", out);
  }
  add_tag(kClose, "message", out);
  add_control(kEndOfMsg, out);
  return out;
}

}  // namespace godwit
