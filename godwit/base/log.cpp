#include "godwit/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

namespace godwit {
namespace {

spdlog::logger& logger() {
  static const auto instance = [] {
    auto log = spdlog::stderr_color_mt("godwit");
    // On a terminal the line of a progress bar is cleared first.
    log->set_pattern(isatty(STDERR_FILENO) ? "\r\x1b[K[%H:%M:%S] %^%l%$ %v" : "[%H:%M:%S] %^%l%$ %v");
    return log;
  }();
  return *instance;
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarn:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

}  // namespace

void set_log_level(LogLevel level) {
  logger().set_level(to_spdlog(level));
}

void log_message(LogLevel level, std::string_view message) {
  logger().log(to_spdlog(level), message);
}

}  // namespace godwit
