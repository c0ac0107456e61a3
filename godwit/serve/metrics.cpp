#include "godwit/serve/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace godwit::serve {
namespace {

void add_value(std::string& out, const char* type, const char* name, const char* help, double value) {
  fmt::format_to(std::back_inserter(out), "# HELP {0} {1}\n# TYPE {0} {2}\n{0} {3}\n", name, help, type,
                 value);
}

}  // namespace

void LatencyHistogram::add(double seconds) {
  const auto bucket = std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin();
  const std::lock_guard lock(mutex_);
  ++counts_[bucket];
  sum_ += seconds;
}

std::string LatencyHistogram::text(const std::string& name, const std::string& help) const {
  const std::lock_guard lock(mutex_);
  std::string out = fmt::format("# HELP {0} {1}\n# TYPE {0} histogram\n", name, help);
  uint64_t total = 0;
  for (size_t i = 0; i < kBounds.size(); ++i) {
    total += counts_[i];
    out += fmt::format("{}_bucket{{le=\"{}\"}} {}\n", name, kBounds[i], total);
  }
  total += counts_.back();
  out += fmt::format("{0}_bucket{{le=\"+Inf\"}} {1}\n{0}_sum {2}\n{0}_count {1}\n", name, total, sum_);
  return out;
}

std::string Metrics::text(const EngineStats& s) const {
  std::string out;
  const auto gauge = [&](const char* name, const char* help, int64_t value) {
    add_value(out, "gauge", name, help, static_cast<double>(value));
  };
  const auto counter = [&](const char* name, const char* help, int64_t value) {
    add_value(out, "counter", name, help, static_cast<double>(value));
  };
  gauge("godwit_requests_waiting", "sequences in the queue", s.waiting);
  gauge("godwit_requests_running", "sequences that run", s.running);
  counter("godwit_requests_finished_total", "sequences that ended well", s.finished);
  counter("godwit_requests_failed_total", "sequences that ended with an error", s.failed);
  counter("godwit_preemptions_total", "sequences that left for want of pages", s.preempted);
  counter("godwit_prompt_tokens_total", "tokens of admitted prompts", s.prompt_tokens);
  counter("godwit_cached_tokens_total", "tokens of prompts that came from the prefix cache", s.cached_tokens);
  counter("godwit_drawn_tokens_total", "tokens drawn", s.drawn_tokens);
  counter("godwit_drafted_tokens_total", "tokens guessed by prompt lookup", s.drafted_tokens);
  counter("godwit_accepted_tokens_total", "guessed tokens that were drawn", s.accepted_tokens);
  counter("godwit_steps_total", "forward calls", s.steps);
  gauge("godwit_pages", "pages of latents", s.pages);
  gauge("godwit_pages_free", "pages of latents that nobody holds", s.free_pages);
  gauge("godwit_prefix_entries", "states in the prefix cache", s.prefix_entries);
  gauge("godwit_prefix_bytes", "KDA states in the prefix cache, bytes", s.prefix_bytes);
  gauge("godwit_host_prefix_entries", "of them states in host memory", s.host_entries);
  gauge("godwit_host_prefix_bytes", "states in host memory, bytes", s.host_bytes);
  gauge("godwit_state_bytes", "states and latents of the store, bytes", s.state_bytes);
  out +=
      first_token.text("godwit_time_to_first_token_seconds", "from a request's arrival to its first token");
  out += between_tokens.text("godwit_inter_token_seconds", "between two tokens of a sequence");
  return out;
}

}  // namespace godwit::serve
