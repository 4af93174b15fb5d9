#include "engine/batch/prefix.h"

#include <algorithm>

namespace sluice::batch {
namespace {

// The finaliser of splitmix64 (Steele et al. 2014).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

PageHashes::PageHashes(std::span<const TokenId> tokens, std::uint64_t kind) : kind_(kind) {
  std::uint64_t hash = mix(kind + 1);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    hash = mix(hash + 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(tokens[i]));
    if ((i + 1) % kPageTokens == 0) hashes_.push_back(hash);
  }
}

std::size_t PageHashes::common_pages(const PageHashes& other) const {
  std::size_t least = 0;
  std::size_t most = std::min(hashes_.size(), other.hashes_.size());
  while (least < most) {
    const std::size_t middle = (least + most + 1) / 2;
    if (hashes_[middle - 1] == other.hashes_[middle - 1]) {
      least = middle;
    } else {
      most = middle - 1;
    }
  }
  return least;
}

std::int64_t common_prefix(std::span<const TokenId> a, const PageHashes& a_pages,
                           std::span<const TokenId> b, const PageHashes& b_pages) {
  if (a_pages.kind() != b_pages.kind()) return 0;
  // The hashes may be of more tokens than the list.
  const std::size_t pages =
      std::min({a_pages.common_pages(b_pages) * kPageTokens, a.size(), b.size()});
  const auto first = static_cast<std::ptrdiff_t>(pages);
  if (!std::equal(a.begin(), a.begin() + first, b.begin())) return 0;
  // At most a page: the next hashes differ.
  const auto end = std::mismatch(a.begin() + first, a.end(), b.begin() + first, b.end()).first;
  return end - a.begin();
}

}  // namespace sluice::batch
