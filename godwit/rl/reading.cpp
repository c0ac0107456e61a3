// "reading": a number in a picture. The only way to the answer is through the vision tower.
#include <algorithm>
#include <array>

#include "godwit/base/check.h"
#include "godwit/io/animation.h"
#include "godwit/io/base64.h"
#include "godwit/rl/environments.h"
#include "godwit/rl/tool_environment.h"

namespace godwit::rl {
namespace {

using nlohmann::json;

constexpr int64_t kCell =
    28;  // pixels of a digit's cell: one vector of a tower with patches of 14, merged by 2
constexpr int64_t kColumns = 3, kRows = 5, kScale = 4;

// Rows of three bits, the left one highest.
constexpr std::array<std::array<uint8_t, kRows>, 10> kDigits = {{{7, 5, 5, 5, 7},
                                                                 {2, 6, 2, 2, 7},
                                                                 {7, 1, 7, 4, 7},
                                                                 {7, 1, 3, 1, 7},
                                                                 {5, 5, 7, 1, 1},
                                                                 {7, 4, 7, 1, 7},
                                                                 {7, 4, 7, 5, 7},
                                                                 {7, 1, 2, 2, 2},
                                                                 {7, 5, 7, 5, 7},
                                                                 {7, 5, 7, 1, 7}}};

struct Options {
  int64_t digits = 2, attempts = 1;
  double noise = 0.2, slip = 0;
};

// Digits side by side, each anywhere in its cell, in a shade of its own on a dark ground with noise.
std::string picture(const std::string& number, double noise, Draws& draws) {
  io::Image image{
      .width = kCell * static_cast<int64_t>(number.size()), .height = kCell, .mode = io::ImageMode::kRgba};
  image.pixels.assign(static_cast<size_t>(4 * image.width * image.height), 255);
  std::vector<int64_t> shade(static_cast<size_t>(image.width * image.height), 30);
  for (size_t d = 0; d < number.size(); ++d) {
    const auto& rows = kDigits.at(static_cast<size_t>(number[d] - '0'));
    const int64_t left = static_cast<int64_t>(d) * kCell + draws.between(0, kCell - kColumns * kScale);
    const int64_t top = draws.between(0, kCell - kRows * kScale), light = draws.between(150, 255);
    for (int64_t y = 0; y < kRows * kScale; ++y) {
      for (int64_t x = 0; x < kColumns * kScale; ++x) {
        if ((rows[static_cast<size_t>(y / kScale)] >> (kColumns - 1 - x / kScale) & 1) != 0)
          shade[static_cast<size_t>((top + y) * image.width + left + x)] = light;
      }
    }
  }
  const auto spread = static_cast<int64_t>(127 * noise);
  for (size_t i = 0; i < shade.size(); ++i) {
    const auto value =
        static_cast<uint8_t>(std::clamp<int64_t>(shade[i] + draws.between(-spread, spread), 0, 255));
    std::fill_n(image.pixels.begin() + static_cast<int64_t>(4 * i), 3, value);
  }
  return "data:image/png;base64," + io::encode_base64(io::encode_png(image));
}

// World: number; left: attempts; first: what the demonstration says first. The picture is a function of the
// task's seed and not kept.
class Reading final : public ToolEnvironment {
 public:
  explicit Reading(const Options& options)
      : ToolEnvironment({.turns = options.attempts + 1}), options_(options) {}

  std::unique_ptr<ChatMessage> demonstrate() override {
    const bool first = world.at("left") == options_.attempts;
    return std::make_unique<ChatMessage>(
        assistant_says(world.at(first ? "first" : "number").get<std::string>()));
  }

 private:
  std::string draw_number(Draws& draws) const {
    std::string number;
    for (int64_t i = 0; i < options_.digits; ++i) number += static_cast<char>('0' + draws.below(10));
    return number;
  }

  Task begin(Draws& draws) override {
    const std::string number = draw_number(draws), other = draw_number(draws);
    world = {{"number", number},
             {"left", options_.attempts},
             {"first", draws.chance(options_.slip) ? other : number}};
    ChatMessage question = user_says("The number?");
    ChatPart shown;
    shown.is_image = true;
    shown.image_url = picture(number, options_.noise, draws);
    question.content.insert(question.content.begin(), std::move(shown));
    return {.messages = {std::move(question)}, .tools = {}, .base_tokens = 0};
  }

  ToolAnswer call(const std::string& tool, const json&, Draws&) override {
    return {.text = "error: there is no tool " + tool, .wrong = true};
  }

  Reply respond(const std::string& text) override {
    const int64_t left = world.at("left").get<int64_t>() - 1;
    world["left"] = left;
    const bool right = text == world.at("number").get<std::string>();
    if (right || left <= 0) return {.success = right ? 1.0 : 0.0};
    return {.next = "No. Look again.", .done = false};
  }

  Options options_;
};

}  // namespace

std::unique_ptr<Environment> make_reading(const json& options) {
  check_options("reading", options, {"digits", "attempts", "noise", "slip"});
  Options o;
  o.digits = options.value("digits", o.digits);
  o.attempts = options.value("attempts", o.attempts);
  o.noise = options.value("noise", o.noise);
  o.slip = options.value("slip", o.slip);
  check(o.digits >= 1 && o.digits <= 16 && o.attempts >= 1 && o.noise >= 0 && o.noise <= 1,
        "environment reading: expected 1 to 16 digits, at least one attempt and noise from 0 to 1");
  return std::make_unique<Reading>(o);
}

}  // namespace godwit::rl
