// Finished sequences that keep their blocks so that later prompts may begin with them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <list>
#include <span>
#include <vector>

#include "engine/batch/prefix.h"
#include "sluice/engine.h"

namespace sluice::batch {

struct CachedPrefix {
  Session session;
  std::vector<TokenId> tokens;  // in the session
  PageHashes pages;
  std::filesystem::path saved = {};  // where it was loaded from, or saved
};

class PrefixCache {
 public:
  explicit PrefixCache(std::size_t most) : most_(most) {}

  // Keeps a session, unless another has all its tokens already, and drops those that it makes
  // superfluous and those beyond the limit, least recently used first.
  void keep(CachedPrefix prefix);
  // The one with the longest common prefix; null: none has any. Counts as used.
  CachedPrefix* find(std::span<const TokenId> tokens, const PageHashes& pages,
                     std::int64_t& common);
  // Drops the least recently used one other than the newest `spared`; false if there is none.
  bool evict(std::size_t spared = 0);
  // Calls body(prefix) for each, most recently used first.
  template <typename Body>
  void for_each(const Body& body) {
    for (CachedPrefix& entry : entries_) body(entry);
  }

  std::size_t size() const { return entries_.size(); }
  // Tokens of blocks that only one of these sessions has.
  std::int64_t own_tokens() const;
  void clear() { entries_.clear(); }

 private:
  std::size_t most_;
  std::list<CachedPrefix> entries_;  // most recently used first
};

}  // namespace sluice::batch
