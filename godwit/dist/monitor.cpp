#include "godwit/dist/monitor.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>

#include "godwit/base/check.h"

namespace godwit::dist {
namespace {

constexpr std::chrono::milliseconds kGrace(500);
constexpr const char* kAbort = "abort";  // the key under which the first to find out leaves word

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}
std::string text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}
std::string sign_key(int64_t rank) {
  return "sign/" + std::to_string(rank);
}

}  // namespace

Monitor::Monitor(MonitorOptions options)
    : options_(std::move(options)),
      limit_(options_.timeout_s),
      period_(std::clamp(options_.timeout_s / 20, 0.05, 1.0)),
      peers_(options_.hosts.size()) {
  beat();
}

Monitor::~Monitor() {
  stop();
}

void Monitor::start() {
  const auto now = Clock::now();
  for (Peer& peer : peers_) peer.changed = now;
  answered_ = now;
  beats_thread_ = std::thread([this] { beat_loop(); });
  watch_thread_ = std::thread([this] { watch_loop(); });
}

void Monitor::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (beats_thread_.joinable()) beats_thread_.join();
  if (watch_thread_.joinable()) watch_thread_.join();
}

void Monitor::enter(const char* name) {
  since_ = Clock::now();
  inside_ = name;
  ++entered_;
}

void Monitor::leave() {
  inside_ = nullptr;
}

void Monitor::broken(const std::string& reason) {
  broken_ = true;
  const auto end = Clock::now() + limit_;
  std::unique_lock lock(mutex_);
  while (Clock::now() < end && !stopping_) wake_.wait_for(lock, period_);
  fail("{} of rank {} broke off, and every rank answers: {}", inside_.load(), options_.rank, reason);
}

void Monitor::announce(const std::string& message) {
  stop();
  try {
    const std::string word = fmt::format("{} failed: {}", name_of(options_.rank), message);
    options_.store->compareSet(kAbort, {}, bytes(word));
    if (options_.serves_store) std::this_thread::sleep_for(kGrace + 4 * period_);
  } catch (const std::exception&) {  // the store is gone: the others see that for themselves
  }
}

// False: it is time to stop.
bool Monitor::wait_period() {
  std::unique_lock lock(mutex_);
  wake_.wait_for(lock, period_, [this] { return stopping_.load(); });
  return !stopping_;
}

void Monitor::beat() {
  const std::string sign = fmt::format("{} {} {}", beats_++, entered_.load(), busy_ ? 1 : 0);
  options_.store->set(sign_key(options_.rank), bytes(sign));
}

void Monitor::beat_loop() {
  std::vector<std::string> keys;
  for (size_t r = 0; r < peers_.size(); ++r) keys.push_back(sign_key(static_cast<int64_t>(r)));
  for (auto last = Clock::now(); wait_period();) {
    const auto woke = Clock::now();
    if (woke - last >
        limit_ / 2) {  // this process itself was stopped (a suspended job): the others count anew
      for (Peer& peer : peers_) peer.changed = peer.last_busy = woke;
    }
    last = woke;
    try {
      beat();
      const auto signs = options_.store->multiGet(keys);
      const auto now = Clock::now();
      for (size_t r = 0; r < peers_.size(); ++r) {
        std::string sign = text(signs[r]);
        if (sign == peers_[r].sign) continue;
        Peer& peer = peers_[r];
        int64_t beats = 0;
        int busy = 0;
        std::sscanf(sign.c_str(), "%ld %ld %d", &beats, &peer.entered, &busy);
        peer.sign = std::move(sign);
        peer.changed = now;
        peer.busy = busy != 0;
        if (peer.busy) peer.last_busy = now;
      }
      answered_ = now;
      if (options_.store->check({kAbort})) end_with(text(options_.store->get(kAbort)));
      const std::string found = verdict(now);
      if (!found.empty()) end_everyone(found);
    } catch (const c10::Error& error) {
      if (stopping_) return;
      const std::string reason = error.what_without_backtrace();
      end_with(fmt::format("{} is gone: {}", options_.store_owner, reason.substr(0, reason.find('\n'))));
    }
  }
}

// The store's calls may block for ever when its process is stopped.
void Monitor::watch_loop() {
  for (auto last = Clock::now(); wait_period();) {
    const auto woke = Clock::now();
    if (woke - last > limit_ / 2) answered_ = woke;  // as in beat_loop
    last = woke;
    const std::chrono::duration<double> silent = woke - answered_.load();
    if (silent > limit_ && !stopping_)
      end_with(fmt::format("{} has not answered for {:.0f} s", options_.store_owner, silent.count()));
  }
}

// Who is to blame, and for what; empty: nobody.
std::string Monitor::verdict(Clock::time_point now) const {
  // A collective that broke off, or that others wait in, says that something is wrong already.
  using Seconds = std::chrono::duration<double>;
  const auto silent_for = [&](int64_t r) { return Seconds(now - peers_[r].changed).count(); };
  const auto gone = [&](int64_t r) {
    return fmt::format("{} is gone: no sign of life for {:.1f} s", name_of(r), silent_for(r));
  };
  const double soon = std::min(limit_.count(), std::max(1.0, 5 * period_.count()));
  const double silence = broken_ ? soon : limit_.count();
  const int64_t entered = entered_;
  auto since = since_.load();
  int64_t late = -1;
  for (int64_t r = 0; r < static_cast<int64_t>(peers_.size()); ++r) {
    if (r == options_.rank) continue;
    const Peer& peer = peers_[r];
    if (silent_for(r) > silence) return gone(r);
    since = std::max(since, peer.last_busy);  // the time for which it was excused does not count
    if (!peer.busy && peer.entered < entered && (late < 0 || peer.entered < peers_[late].entered)) late = r;
  }
  const char* inside = inside_;
  const std::chrono::duration<double> waited = now - since;
  if (inside == nullptr || broken_ || waited <= limit_) return "";
  if (late >= 0 && silent_for(late) > soon) return gone(late);
  if (late >= 0)
    return fmt::format("{} hangs: the others have waited for it in {} for {:.1f} s", name_of(late), inside,
                       waited.count());
  if (waited <= 2 * limit_) return "";
  return fmt::format("{} has not ended for {:.1f} s although every rank is in it: is the network down?",
                     inside, waited.count());
}

std::string Monitor::name_of(int64_t rank) const {
  return fmt::format("rank {} (host {})", rank, options_.hosts[rank]);
}

void Monitor::end_with(const std::string& message) {
  std::fprintf(stderr, "godwit: %s\n", message.c_str());
  std::fflush(stderr);
  // With this process the store goes: first the others read what is in it.
  if (options_.serves_store) std::this_thread::sleep_for(kGrace + 4 * period_);
  ::_exit(1);
}

void Monitor::end_everyone(const std::string& message) {
  std::string word = message;
  try {
    word = text(options_.store->compareSet(kAbort, {}, bytes(message)));  // whose word came first
  } catch (const std::exception&) {                                       // no store, but the message stands
  }
  end_with(word);
}

}  // namespace godwit::dist
