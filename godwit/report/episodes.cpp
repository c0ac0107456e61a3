#include "godwit/report/episodes.h"

#include <fmt/format.h>

#include <charconv>
#include <map>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/report/chart.h"

namespace godwit::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMostText = 4000;  // bytes of one part of a turn: an observation may be huge

// step-12.json: 12; anything else: -1.
int64_t step_of(const fs::path& path) {
  const std::string stem = path.stem().string();
  int64_t step = -1;
  if (path.extension() != ".json" || !stem.starts_with("step-")) return -1;
  const auto done = std::from_chars(stem.data() + 5, stem.data() + stem.size(), step);
  return done.ec == std::errc() && done.ptr == stem.data() + stem.size() ? step : -1;
}

void read_file_of(const fs::path& path, int64_t step, std::vector<Episode>& out) {
  try {
    for (const json& e : json::parse(read_file(path))) {
      Episode episode{.step = step,
                      .group = e.at("group"),
                      .sample = e.at("sample"),
                      .reward = e.at("reward"),
                      .success = e.at("success"),
                      .reason = e.at("reason"),
                      .turns = {}};
      for (const json& t : e.at("turns")) {
        episode.turns.push_back({.before = t.at("before"),
                                 .written = t.at("written"),
                                 .calls = t.at("calls"),
                                 .faults = t.at("faults"),
                                 .reward = t.at("reward")});
      }
      out.push_back(std::move(episode));
    }
  } catch (const json::exception& error) {
    fail("{}: no list of episodes: {}", path.string(), error.what());
  }
}

// Shortened in the middle, at borders of UTF-8 characters.
std::string shown(const std::string& text) {
  if (text.size() <= kMostText) return escape(text);
  const auto continues = [&](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80; };
  size_t head = kMostText / 2, tail = text.size() - kMostText / 2;
  while (head > 0 && continues(head)) --head;
  while (tail < text.size() && continues(tail)) ++tail;
  return escape(text.substr(0, head)) + fmt::format("\n… {} bytes …\n", tail - head) +
         escape(text.substr(tail));
}

}  // namespace

std::vector<Episode> read_episodes(const fs::path& run) {
  std::map<int64_t, fs::path> files;
  if (fs::is_directory(run / "trajectories")) {
    for (const auto& entry : fs::directory_iterator(run / "trajectories"))
      if (const int64_t step = step_of(entry.path()); step >= 0) files[step] = entry.path();
  }
  std::vector<Episode> out;
  if (files.empty()) return out;
  read_file_of(files.begin()->second, files.begin()->first, out);
  if (files.size() > 1) read_file_of(files.rbegin()->second, files.rbegin()->first, out);
  return out;
}

std::string episodes_html(const std::vector<Episode>& episodes) {
  std::string out;
  for (const Episode& e : episodes) {
    out += fmt::format(
        "<details><summary>step {}, task {}, sample {}: reward {:.3f}, {} ({}), {} turns</summary>\n", e.step,
        e.group, e.sample, e.reward, e.success >= 0.5 ? "solved" : "not solved", escape(e.reason),
        e.turns.size());
    for (const EpisodeTurn& turn : e.turns) {
      out += fmt::format("<pre class=\"read\">{}</pre>\n<pre class=\"written\">{}</pre>\n",
                         shown(turn.before), shown(turn.written));
      if (turn.calls > 0 || turn.reward != 0) {
        out += fmt::format("<p class=\"lead\">{} calls, {} of them failed, reward of the turn {:.3f}</p>\n",
                           turn.calls, turn.faults, turn.reward);
      }
    }
    out += "</details>\n";
  }
  return out;
}

}  // namespace godwit::report
