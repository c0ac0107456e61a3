#include "godwit/report/run.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "godwit/base/check.h"
#include "godwit/base/file.h"

namespace godwit::report {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

double number(const json& value) {
  return value.is_number() ? value.get<double>() : kNone;
}

double number_at(const json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? kNone : number(*found);
}

// A list whose entries are numbers or null (not finite); anything else is no list of numbers.
bool is_list(const json& value) {
  if (!value.is_array() || value.empty()) return false;
  for (const json& item : value)
    if (!item.is_number() && !item.is_null()) return false;
  return true;
}

void add_row(Run& run, const json& row, size_t index) {
  for (const auto& [key, value] : row.items()) {
    if (is_list(value)) {
      ListColumn& column = run.lists[key];
      column.resize(index + 1);
      for (const json& item : value) column[index].push_back(number(item));
    } else if (value.is_number() || value.is_null()) {
      Column& column = run.numbers[key];
      column.resize(index + 1, kNone);
      column[index] = number(value);
    }
  }
  const auto stage = row.find("stage");
  const std::string name =
      stage != row.end() && stage->is_string() ? stage->get<std::string>() : std::string();
  if (run.stages.empty() || run.stages.back().name != name)
    run.stages.push_back({.name = name, .context = number_at(row, "context"), .first = index, .last = index});
  run.stages.back().last = index;
}

// What is null in the file was not finite.
void note_missing(Run& run, const json& row) {
  for (const char* key : {"loss", "grad_norm", "reward"}) {
    const auto found = row.find(key);
    if (found != row.end() && found->is_null())
      run.notes.push_back(
          fmt::format("step {}: {} is not a finite number", row.value("step", json(0)).dump(), key));
  }
}

void read_metrics(Run& run, const fs::path& path) {
  const std::string text = read_file(path);
  size_t at = 0, number = 0, rows = 0;
  while (at < text.size()) {
    ++number;
    const size_t newline = text.find('\n', at);
    const bool whole = newline != std::string::npos;
    const std::string_view line = std::string_view(text).substr(at, whole ? newline - at : std::string::npos);
    at = whole ? newline + 1 : text.size();
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const json row = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!whole && !row.is_object()) {
      run.notes.push_back(fmt::format("line {} of metrics.jsonl was cut short and is left out", number));
      break;
    }
    check(row.is_object() && row.contains("step") && row["step"].is_number(),
          "{}:{}: expected a JSON object with a step", path.string(), number);
    note_missing(run, row);
    add_row(run, row, rows++);
  }
  check(rows > 0, "{}: holds no finished step", path.string());
  for (auto& [key, column] : run.numbers) column.resize(rows, kNone);
  for (auto& [key, column] : run.lists) column.resize(rows);
}

void read_record(Run& run, const fs::path& path) {
  const json record = json::parse(read_file(path), nullptr, /*allow_exceptions=*/false);
  check(record.is_object(), "{}: expected a JSON object", path.string());
  const auto items = [&](const char* key) {
    const auto found = record.find(key);
    const bool there = found != record.end() && found->is_array();
    return there ? *found : json::array();
  };
  for (const json& gate : items("gates")) {
    check(gate.is_object(), "{}: gates: expected objects", path.string());
    const auto name = gate.find("stage");
    run.gates.push_back({.stage = name != gate.end() && name->is_string() ? name->get<std::string>() : "",
                         .context = number_at(gate, "context"),
                         .before = number_at(gate, "before"),
                         .after = number_at(gate, "after"),
                         .limit = number_at(gate, "limit"),
                         .step = number_at(gate, "step")});
  }
  for (const json& bucket : items("loss_by_position")) {
    check(bucket.is_array() && bucket.size() == 3, "{}: loss_by_position: expected [begin, end, nats]",
          path.string());
    run.positions.push_back(
        {.begin = number(bucket[0]), .end = number(bucket[1]), .nats = number(bucket[2])});
  }
  for (const json& layer : items("expert_load")) {
    check(layer.is_array(), "{}: expert_load: expected a list for each layer", path.string());
    run.expert_load.emplace_back();
    for (const json& load : layer) run.expert_load.back().push_back(number(load));
  }
}

}  // namespace

size_t Run::rows() const {
  const auto found = numbers.find("step");
  return found == numbers.end() ? 0 : found->second.size();
}

const Column& Run::column(const std::string& key) const {
  static const Column none;
  const auto found = numbers.find(key);
  return found == numbers.end() ? none : found->second;
}

const ListColumn& Run::list(const std::string& key) const {
  static const ListColumn none;
  const auto found = lists.find(key);
  return found == lists.end() ? none : found->second;
}

Run read_run(const fs::path& directory) {
  check(fs::is_directory(directory), "{}: no such run directory", directory.string());
  const fs::path metrics = directory / "metrics.jsonl", record = directory / "record.json";
  check(fs::exists(metrics), "{}: has no metrics.jsonl: not a run directory, or it has not finished a step",
        directory.string());
  Run run;
  const fs::path whole = fs::absolute(directory).lexically_normal();
  run.name = (whole.has_filename() ? whole : whole.parent_path()).filename().string();
  read_metrics(run, metrics);
  if (fs::exists(record)) read_record(run, record);
  run.episodes = read_episodes(directory);
  return run;
}

}  // namespace godwit::report
