#include "engine/batch/prefix_cache.h"

#include <utility>

namespace sluice::batch {

void PrefixCache::keep(CachedPrefix prefix) {
  if (most_ == 0 || prefix.tokens.empty()) return;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const std::int64_t common =
        common_prefix(entry->tokens, entry->pages, prefix.tokens, prefix.pages);
    if (common == std::ssize(prefix.tokens)) {
      entries_.splice(entries_.begin(), entries_, entry);
      return;
    }
    entry = common == std::ssize(entry->tokens) ? entries_.erase(entry) : std::next(entry);
  }
  entries_.push_front(std::move(prefix));
  while (entries_.size() > most_) evict();
}

CachedPrefix* PrefixCache::find(std::span<const TokenId> tokens, const PageHashes& pages,
                                std::int64_t& common) {
  auto best = entries_.end();
  common = 0;
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    const std::int64_t shared = common_prefix(entry->tokens, entry->pages, tokens, pages);
    if (shared <= common) continue;
    best = entry;
    common = shared;
  }
  if (best == entries_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, best);
  return &entries_.front();
}

bool PrefixCache::evict(std::size_t spared) {
  if (entries_.size() <= spared) return false;
  entries_.pop_back();
  return true;
}

std::int64_t PrefixCache::own_tokens() const {
  std::int64_t tokens = 0;
  for (const CachedPrefix& entry : entries_) tokens += entry.session.room().own;
  return tokens;
}

}  // namespace sluice::batch
