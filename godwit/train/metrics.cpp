#include "godwit/train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>

#include "godwit/base/check.h"
#include "godwit/base/file.h"
#include "godwit/base/log.h"

namespace godwit {
namespace {

using nlohmann::json;

// These lead every line, in this order; the rest follows by name.
constexpr const char* kFirst[] = {"step", "stage",     "context",      "tokens",  "loss",
                                  "lr",   "grad_norm", "tokens_per_s", "max_vio", "dead_experts"};

std::string to_line(const json& row) {
  nlohmann::ordered_json ordered;
  for (const char* key : kFirst)
    if (row.contains(key)) ordered[key] = row.at(key);
  for (const auto& [key, value] : row.items())
    if (!ordered.contains(key)) ordered[key] = value;
  return ordered.dump() + "\n";
}

Scalars to_scalars(const json& row) {
  Scalars out;
  for (const auto& [key, value] : row.items()) {
    if (key == "step") continue;
    if (value.is_number()) out.emplace_back(key, value.get<float>());
    if (!value.is_array() || value.empty()) continue;
    double sum = 0, most = -INFINITY;
    bool numbers = true;
    for (const json& item : value) {
      if (!(numbers = item.is_number())) break;
      sum += item.get<double>();
      most = std::max(most, item.get<double>());
    }
    if (!numbers) continue;
    out.emplace_back(key + "/max", static_cast<float>(most));
    out.emplace_back(key + "/mean", static_cast<float>(sum / static_cast<double>(value.size())));
  }
  return out;
}

}  // namespace

MetricsWriter::MetricsWriter(MetricsOptions options)
    : options_(std::move(options)),
      path_(options_.directory / "metrics.jsonl"),
      events_(options_.directory / "tensorboard") {}

MetricsWriter::~MetricsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

void MetricsWriter::open() {
  if (fd_ >= 0) return;
  std::filesystem::create_directories(options_.directory);
  fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  check(fd_ >= 0, "{}: cannot be opened: {}", path_.string(), std::strerror(errno));
  end_ = ::lseek(fd_, 0, SEEK_END);
}

void MetricsWriter::write(const json& row) {
  check(row.is_object() && row.contains("step") && row.at("step").is_number_integer(),
        "metrics: a row needs an integer step, got {}", row.dump());
  open();
  const auto step = row.at("step").get<int64_t>();
  check(!last_step_ || step > *last_step_, "metrics: step {} comes after step {}", step,
        last_step_.value_or(0));
  const std::string line = to_line(row);
  for (std::string_view rest = line; !rest.empty();) {
    const ssize_t written = ::pwrite(fd_, rest.data(), rest.size(), end_);
    if (written < 0 && errno == EINTR) continue;
    check(written > 0, "{}: cannot be written: {}", path_.string(), std::strerror(errno));
    rest.remove_prefix(static_cast<size_t>(written));
    end_ += written;
  }
  last_step_ = step;
  if (options_.tensorboard) events_.write(step, to_scalars(row));
}

void MetricsWriter::truncate_after(int64_t step) {
  open();
  const std::string text = read_file(path_);
  last_step_.reset();
  end_ = 0;
  for (int64_t number = 1, last = 0; last < step && static_cast<size_t>(end_) < text.size(); ++number) {
    const size_t newline = text.find('\n', static_cast<size_t>(end_));
    if (newline == std::string::npos) break;  // cut short
    const json row = json::parse(text.begin() + end_, text.begin() + static_cast<int64_t>(newline), nullptr,
                                 /*allow_exceptions=*/false);
    check(row.is_object() && row.contains("step") && row["step"].is_number_integer(),
          "{}:{}: expected a JSON object with a step", path_.string(), number);
    const auto row_step = row["step"].get<int64_t>();
    check(row_step > last, "{}:{}: step {} comes after step {}", path_.string(), number, row_step, last);
    if (row_step > step) break;
    last_step_ = last = row_step;
    end_ = static_cast<int64_t>(newline) + 1;
  }
  if (last_step_.value_or(0) < step)
    log_warn("{}: ends at step {}, before the checkpoint of step {}", path_.string(), last_step_.value_or(0),
             step);
  check(::ftruncate(fd_, end_) == 0, "{}: cannot be cut: {}", path_.string(), std::strerror(errno));
  events_.restart();
}

void MetricsWriter::flush() {
  if (fd_ >= 0)
    check(::fdatasync(fd_) == 0, "{}: cannot be synced: {}", path_.string(), std::strerror(errno));
}

}  // namespace godwit
