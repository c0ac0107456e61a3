#include "godwit/data/sample.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <regex>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/io/base64.h"
#include "godwit/io/video.h"
#include "godwit/text/chat_json.h"

namespace godwit::data {
namespace {

using Json = nlohmann::ordered_json;

// A picture as an item of its own. `width`, `height`: of the original.
struct Picture {
  MediaEntry entry;
  int64_t width = 0, height = 0;
};

// Decodes every frame: what cannot be read should stop the packing, not the training on it.
Picture measure(std::vector<std::string> frames, const io::ImageProcessorConfig& processor,
                const std::string& where) {
  Picture out;
  for (const std::string& frame : frames) {
    const io::Image image = io::decode_image(io::as_bytes(frame), where);
    if (out.width > 0) continue;  // the first one's size is that of all
    out.width = image.width;
    out.height = image.height;
  }
  const io::ImagePlan plan = io::plan_image(out.width, out.height, processor);
  out.entry.tokens = static_cast<uint32_t>(plan.tokens);
  out.entry.rows = static_cast<uint32_t>(plan.grid_height);
  out.entry.columns = static_cast<uint32_t>(plan.grid_width);
  out.entry.frames = std::move(frames);
  return out;
}

// Ids with their marks of the loss, and the items at their places.
class Writer {
 public:
  Writer(const Tokenizer& tokenizer, const io::ImageProcessorConfig& processor, const Document& document)
      : tokenizer_(tokenizer), processor_(processor), document_(document) {}

  void text(const std::string& text, bool trained) {
    tokenizer_.encode_append(text, out_.ids);
    out_.trained.resize(out_.ids.size(), trained ? 1 : 0);
    if (trained) out_.trained_text += text;
  }

  // Not trained, whatever stands around it.
  void media(const std::string& prompt, MediaEntry entry) {
    const std::vector<int32_t> ids = tokenizer_.encode_with_specials(prompt);
    const int32_t pad = tokenizer_.special_id(kMediaPad);
    entry.token = out_.ids.size() + static_cast<size_t>(std::ranges::find(ids, pad) - ids.begin());
    out_.ids.insert(out_.ids.end(), ids.begin(), ids.end());
    out_.trained.resize(out_.ids.size(), 0);
    out_.media.push_back(std::move(entry));
  }

  void picture(const std::string& source, const std::string& where) {
    Picture p = measure({picture_bytes(document_, source, where)}, processor_, where);
    media(image_prompt(p.width, p.height, p.entry.tokens), std::move(p.entry));
  }

  // Each few frames become vectors together, behind the time of the first.
  void video(const Json& part, const std::string& where) {
    check(!part.contains("fps") || part.at("fps").is_number(), "{}.fps: expected a number", where);
    const double fps = part.value("fps", 8.0);
    check(fps >= 0.001 && fps <= 1000, "{}.fps: must be 0.001 to 1000, got {}", where, fps);
    const std::vector<std::string> frames = video_frames(part, fps, where);
    for (size_t first = 0; first < frames.size(); first += io::kFramesTogether) {
      const size_t count = std::min<size_t>(io::kFramesTogether, frames.size() - first);
      Picture p = measure({frames.begin() + static_cast<int64_t>(first),
                           frames.begin() + static_cast<int64_t>(first + count)},
                          processor_, where);
      text(io::timestamp(static_cast<double>(first) / fps), /*trained=*/false);
      media(video_prompt(p.width, p.height, p.entry.tokens), std::move(p.entry));
    }
  }

  ChatSample take() { return std::move(out_); }

 private:
  std::vector<std::string> video_frames(const Json& part, double fps, const std::string& where) const {
    check(part.contains("video"), "{}.video: missing", where);
    const Json& video = part.at("video");
    if (video.is_array()) {
      check(!video.empty(), "{}.video: no frames", where);
      check(std::ssize(video) <= io::kMostFrames, "{}.video: {} frames, at most {} are taken", where,
            video.size(), io::kMostFrames);
      std::vector<std::string> frames;
      for (const Json& frame : video) {
        check(frame.is_string(), "{}.video: expected names of pictures, got {}", where, frame.type_name());
        frames.push_back(picture_bytes(document_, frame.get<std::string>(), where));
      }
      return frames;
    }
    check(video.is_string(),
          "{}.video: expected a list of pictures, a directory, an animation or a video file, got {}", where,
          video.type_name());
    const auto source = video.get<std::string>();
    const fs::path path = document_.directory / source;
    std::error_code error;
    if (!document_.members && !source.starts_with("data:") && fs::is_directory(path, error))
      return io::frames_of_directory(path);
    const std::string bytes = picture_bytes(document_, source, where);
    if (io::is_video_file(bytes)) return io::frames_of_video_file(bytes, fps, where);
    return io::frames_of_animation(bytes, where);
  }

  const Tokenizer& tokenizer_;
  const io::ImageProcessorConfig& processor_;
  const Document& document_;
  ChatSample out_;
};

std::string string_at(const Json& object, const char* key, const std::string& where) {
  check(object.contains(key) && object.at(key).is_string(), "{}.{}: expected text", where, key);
  return object.at(key).get<std::string>();
}

ChatSample content_sample(Writer writer, const Json& json) {
  const Json& content = json.at("content");
  check(content.is_array(), "content: expected a list of parts, got {}", content.type_name());
  const bool asks = json.contains("answer");
  for (size_t i = 0; i < content.size(); ++i) {
    const std::string where = fmt::format("content[{}]", i);
    const Json& part = content[i];
    check(part.is_object(), "{}: expected an object with a type, got {}", where, part.type_name());
    const std::string type = string_at(part, "type", where);
    if (type == "text")
      writer.text(string_at(part, "text", where), !asks);
    else if (type == "image")
      writer.picture(string_at(part, "image", where), where);
    else if (type == "image_url" && part.contains("image_url") && part["image_url"].is_object())
      writer.picture(string_at(part["image_url"], "url", where + ".image_url"), where);
    else if (type == "video")
      writer.video(part, where);
    else
      fail("{}.type: expected text, image, image_url or video, got '{}'", where, type);
  }
  if (asks) {
    check(json.at("answer").is_string(), "answer: expected text, got {}", json.at("answer").type_name());
    writer.text(json.at("answer").get<std::string>(), /*trained=*/true);
  }
  ChatSample out = writer.take();
  out.end_trained = true;
  return out;
}

// The messages of a conversation as they are written; `measure` gives each of its images its size.
std::vector<ChatSegment> chat_segments(const Json& json,
                                       const std::function<void(ChatPart&, size_t)>& measure) {
  std::vector<ChatMessage> messages = messages_from_json(json.at("messages"));
  check(std::ranges::any_of(messages,
                            [](const ChatMessage& m) { return m.role == ChatRole::kAssistant && m.train; }),
        "no assistant message to train on");
  for (size_t m = 0; m < messages.size(); ++m) {
    for (ChatPart& part : messages[m].content) {
      if (part.is_image) measure(part, m);
    }
  }
  ChatOptions options = chat_options_from_json(json);
  options.generation_prompt = false;
  return render_chat(messages, options);
}

// Conversations: sizes go into the image parts before rendering; the placeholders are found in the ids again.
ChatSample messages_sample(const Tokenizer& tokenizer, const io::ImageProcessorConfig& processor,
                           const Document& document, const Json& json) {
  std::vector<MediaEntry> media;
  std::vector<ChatSegment> segments = chat_segments(json, [&](ChatPart& part, size_t message) {
    const std::string where = fmt::format("messages[{}]", message);
    Picture p = measure({picture_bytes(document, part.image_url, where)}, processor, where);
    part.width = p.width;
    part.height = p.height;
    part.tokens = p.entry.tokens;
    media.push_back(std::move(p.entry));
  });
  ChatIds encoded = encode_chat(segments, tokenizer);
  std::erase_if(segments, [](const ChatSegment& s) { return !s.trained; });
  ChatSample out{std::move(encoded.ids), std::move(encoded.trained), chat_text(segments)};
  const std::optional<int32_t> pad = tokenizer.find_special(kMediaPad);
  size_t at = 0;
  for (MediaEntry& entry : media) {
    while (out.ids[at] != pad) ++at;
    entry.token = at;
    at += entry.tokens;
  }
  out.media = std::move(media);
  return out;
}

}  // namespace

std::string picture_bytes(const Document& document, const std::string& source, const std::string& where) {
  if (std::optional<std::string> bytes = io::decode_data_url(source, where)) return std::move(*bytes);
  if (document.members) {
    const auto found = document.members->find(source);
    check(found != document.members->end(), "{}: the archive has no member '{}' for this sample", where,
          source);
    return found->second;
  }
  check(source.find("://") == std::string::npos, "{}: '{}' is not fetched; give a path or a data URL", where,
        source);
  check(source.find('\0') == std::string::npos, "{}: a file's name holds no zero byte", where);
  return io::read_media_file(document.directory / source);
}

ChatSample document_sample(const Tokenizer& tokenizer, const io::ImageProcessorConfig& processor,
                           const Document& document) {
  try {
    const Json json = Json::parse(document.text);
    check(json.is_object() && (json.contains("content") || json.contains("messages")),
          "expected an object with \"content\" or \"messages\"");
    if (json.contains("content")) return content_sample(Writer(tokenizer, processor, document), json);
    return messages_sample(tokenizer, processor, document, json);
  } catch (const std::exception& error) {
    fail("{}: {}", document.where, error.what());
  }
}

std::string plain_text(const Document& document) {
  static const std::regex kSpecial(R"(<\|[a-z_]+\|>)");
  if (!document.chat) return std::string(document.text);
  std::string text;
  try {
    const Json json = Json::parse(document.text);
    if (json.contains("content")) {
      for (const Json& part : json.at("content"))
        text += part.is_object() && part.contains("text") ? string_at(part, "text", "content")
                                                          : "\nimage 28x28\n";
      return json.contains("answer") ? text + string_at(json, "answer", "line") : text;
    }
    const auto any_size = [](ChatPart& part, size_t) { part.width = part.height = 28; };
    for (const ChatSegment& segment : chat_segments(json, any_size))
      text += segment.control ? std::regex_replace(segment.text, kSpecial, "\n") : segment.text;
  } catch (const std::exception& error) {
    fail("{}: {}", document.where, error.what());
  }
  return text;
}

ChatSample chat_sample(const Tokenizer& tokenizer, std::string_view line, const std::string& where) {
  return document_sample(tokenizer, {}, {.text = line, .chat = true, .where = where});
}

}  // namespace godwit::data
