#include "godwit/infer/prefix_cache.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "godwit/base/check.h"
#include "godwit/base/rng.h"

namespace godwit {
namespace {

constexpr uint64_t kPrefixStream = 0x707265666978;  // "prefix"
constexpr size_t kMostSeen = size_t{1} << 20;

// hash[i] of the first (i + 1) pages.
std::vector<uint64_t> page_hashes(std::span<const int64_t> tokens) {
  std::vector<uint64_t> hashes(tokens.size() / kLatentPage);
  uint64_t hash = kPrefixStream;
  for (size_t page = 0; page < hashes.size(); ++page) {
    for (int64_t i = 0; i < kLatentPage; ++i)
      hash = random_bits(hash, kPrefixStream, static_cast<uint64_t>(tokens[page * kLatentPage + i]));
    hashes[page] = hash;
  }
  return hashes;
}

}  // namespace

std::optional<PrefixCache::Hit> PrefixCache::find(std::span<const int64_t> prompt) {
  const std::vector<uint64_t> hashes = page_hashes(prompt);
  for (size_t pages = hashes.size(); pages > 0; --pages) {
    if (pages * kLatentPage >= prompt.size()) continue;
    const auto it = by_hash_.find(hashes[pages - 1]);
    if (it == by_hash_.end()) continue;
    const Entry& entry = *it->second;
    if (!std::equal(entry.keys.begin(), entry.keys.end(), prompt.begin(),
                    prompt.begin() + static_cast<int64_t>(pages) * kLatentPage))
      continue;
    Entries& tier = entry.stored ? stored_ : host_;
    tier.splice(tier.begin(), tier, it->second);
    return Hit{.length = static_cast<int64_t>(entry.keys.size()), .stored = entry.stored, .host = entry.host};
  }
  return std::nullopt;
}

std::vector<int64_t> PrefixCache::boundaries(std::span<const int64_t> prompt, int64_t start) {
  const auto length = static_cast<int64_t>(prompt.size());
  const std::vector<uint64_t> hashes = page_hashes(prompt);
  std::vector<int64_t> out;
  for (int64_t at = options_.interval; at < length; at += options_.interval) out.push_back(at);
  const int64_t granule = options_.granule;
  // The end; and one granule before it where the end is a granule's, or the same prompt could not use it.
  out.push_back(length / granule * granule);
  out.push_back((length - 1) / granule * granule);
  out.push_back(known_pages(hashes) * kLatentPage / granule * granule);
  if (seen_.size() > kMostSeen) seen_.clear();
  seen_.insert(hashes.begin(), hashes.end());
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  std::erase_if(out, [&](int64_t at) { return at <= start || at % granule != 0; });
  return out;
}

int64_t PrefixCache::known_pages(const std::vector<uint64_t>& hashes) const {
  const auto unknown =
      std::find_if(hashes.begin(), hashes.end(), [&](uint64_t hash) { return !seen_.contains(hash); });
  return unknown - hashes.begin();
}

int64_t PrefixCache::known_tokens(std::span<const int64_t> prompt) const {
  return known_pages(page_hashes(prompt)) * kLatentPage;
}

void PrefixCache::insert(std::span<const int64_t> prefix, StateSnapshot state) {
  check(!prefix.empty() && prefix.size() % kLatentPage == 0 &&
            state.length == static_cast<int64_t>(prefix.size()),
        "prefix cache: a state after {} tokens cannot stand for a prefix of {}", state.length, prefix.size());
  const int64_t size = state.bytes();
  if (size > options_.max_bytes) return;
  const uint64_t hash = page_hashes(prefix).back();
  if (const auto it = by_hash_.find(hash); it != by_hash_.end()) {
    if (it->second->stored) return;
    drop(host_, it->second);
  }
  while (bytes_ + size > options_.max_bytes) evict();
  bytes_ += size;
  stored_.push_front({.hash = hash,
                      .keys = std::vector<int64_t>(prefix.begin(), prefix.end()),
                      .stored = std::move(state),
                      .host = {}});
  by_hash_[hash] = stored_.begin();
}

void PrefixCache::drop(Entries& entries, Entries::iterator entry) {
  (entry->stored ? bytes_ : host_bytes_) -= entry->stored ? entry->stored->bytes() : entry->host.bytes();
  by_hash_.erase(entry->hash);
  entries.erase(entry);
}

void PrefixCache::to_host(Entry entry) {
  if (state_.host_bytes(*entry.stored) > options_.host_bytes) return;
  entry.host = state_.copy_to_host(*entry.stored);
  entry.stored.reset();
  host_bytes_ += entry.host.bytes();
  while (host_bytes_ > options_.host_bytes) drop(host_, std::prev(host_.end()));
  host_.push_front(std::move(entry));
  by_hash_[host_.front().hash] = host_.begin();
}

bool PrefixCache::evict() {
  if (stored_.empty()) return false;
  Entry last = std::move(stored_.back());
  bytes_ -= last.stored->bytes();
  by_hash_.erase(last.hash);
  stored_.pop_back();
  to_host(std::move(last));
  return true;
}

}  // namespace godwit
