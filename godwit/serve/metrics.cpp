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

// Hits of the prefix cache by group of layers. Latents could serve every token that came before; the
// recurrent states stand at certain boundaries only, and what is skipped ends at one for both. Where the
// first grows and the second does not, prompts part where no state lies.
void add_groups(std::string& out, const EngineStats& s) {
  out +=
      "# HELP godwit_cache_hit_tokens_total tokens of prompts that a cache group could serve\n"
      "# TYPE godwit_cache_hit_tokens_total counter\n";
  fmt::format_to(std::back_inserter(out),
                 "godwit_cache_hit_tokens_total{{group=\"mla\"}} {}\n"
                 "godwit_cache_hit_tokens_total{{group=\"kda\"}} {}\n",
                 s.known_tokens, s.cached_tokens);
  out +=
      "# HELP godwit_prefix_hits_total prompts that went on from a cached state, by where it lay\n"
      "# TYPE godwit_prefix_hits_total counter\n";
  fmt::format_to(std::back_inserter(out),
                 "godwit_prefix_hits_total{{tier=\"device\"}} {}\n"
                 "godwit_prefix_hits_total{{tier=\"host\"}} {}\n",
                 s.prefix_hits - s.host_hits, s.host_hits);
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

void RecentRate::add(Clock::time_point now) {
  const int64_t number = std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count();
  const std::lock_guard lock(mutex_);
  Second& second = seconds_[number % seconds_.size()];
  if (second.number != number) second = {.number = number, .events = 0};
  ++second.events;
}

double RecentRate::per_second(Clock::time_point now) const {
  const int64_t number = std::chrono::duration_cast<std::chrono::seconds>(now.time_since_epoch()).count();
  const std::lock_guard lock(mutex_);
  int64_t events = 0;
  for (const Second& second : seconds_) {
    if (second.number < number && second.number >= number - kSeconds) events += second.events;
  }
  return static_cast<double>(events) / kSeconds;
}

void AnswerCounts::add(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++counts_[{path, status}];
}

std::string AnswerCounts::text() const {
  const std::lock_guard lock(mutex_);
  std::string out =
      "# HELP godwit_http_answers_total answers, by path and status\n"
      "# TYPE godwit_http_answers_total counter\n";
  for (const auto& [key, count] : counts_)
    fmt::format_to(std::back_inserter(out), "godwit_http_answers_total{{path=\"{}\",status=\"{}\"}} {}\n",
                   key.first, key.second, count);
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
  gauge("godwit_requests_waiting", "requests in the queue, those that are being read among them", waiting);
  gauge("godwit_requests_running", "requests of which at least one sequence has had its place", running);
  gauge("godwit_sequences_waiting", "sequences (each choice of a prompt is one) in the queue", s.waiting);
  gauge("godwit_sequences_running", "sequences that run", s.running);
  counter("godwit_sequences_finished_total", "sequences that ended well", s.finished);
  counter("godwit_sequences_failed_total", "sequences that ended with an error", s.failed);
  gauge("godwit_picture_tokens", "tokens of the pictures that open requests hold", picture_tokens);
  counter("godwit_preemptions_total", "sequences that left for want of pages", s.preempted);
  counter("godwit_prompt_tokens_total", "tokens of admitted prompts", s.prompt_tokens);
  counter("godwit_cached_tokens_total", "tokens of prompts that came from the prefix cache", s.cached_tokens);
  counter("godwit_drawn_tokens_total", "tokens drawn", s.drawn_tokens);
  counter("godwit_drafted_tokens_total", "tokens guessed by prompt lookup", s.drafted_tokens);
  counter("godwit_accepted_tokens_total", "guessed tokens that were drawn", s.accepted_tokens);
  add_value(out, "gauge", "godwit_tokens_per_second", "tokens drawn a second, over the last ten",
            tokens.per_second());
  counter("godwit_steps_total", "forward calls", s.steps);
  add_groups(out, s);
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
  out += queue_time.text("godwit_queue_seconds", "from a request's arrival to its place in the engine");
  out += request_time.text("godwit_request_seconds", "from a request's arrival to the end of its answer");
  out += answers.text();
  return out;
}

}  // namespace godwit::serve
