// Log lines on stderr: `[time] level message`. spdlog stays behind log.cpp.
#pragma once

#include <fmt/format.h>

#include <string_view>
#include <utility>

namespace godwit {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

void set_log_level(LogLevel level);
void log_message(LogLevel level, std::string_view message);

template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_message(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warn(fmt::format_string<Args...> format, Args&&... args) {
  log_message(LogLevel::kWarn, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace godwit
