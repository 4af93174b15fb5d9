// Finds common prefixes of token lists by hashed pages.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/types.h"

namespace sluice::batch {

// A hash for every whole page, of all tokens up to the page's end: two lists have the same hash at
// a page only if they are the same up to there, but for collisions.
class PageHashes {
 public:
  PageHashes() = default;
  // Lists with different `kind` have nothing in common: their rows differ.
  PageHashes(std::span<const TokenId> tokens, std::uint64_t kind);

  // Pages at the beginning that both have, found by bisection.
  std::size_t common_pages(const PageHashes& other) const;

  std::uint64_t kind() const { return kind_; }

 private:
  std::uint64_t kind_ = 0;
  std::vector<std::uint64_t> hashes_;
};

// Tokens at the beginning that both lists have: whole pages by their hashes, the rest one by one.
// The hashes may be those of a longer list that begins with the tokens. Compares the pages' tokens,
// too, so a collision gives 0.
std::int64_t common_prefix(std::span<const TokenId> a, const PageHashes& a_pages,
                           std::span<const TokenId> b, const PageHashes& b_pages);

}  // namespace sluice::batch
