#include "offload/attention/listed_tokens.h"

#include <algorithm>
#include <numeric>

namespace sluice {

void ListedTokens::count(std::span<const std::uint8_t> listed) {
  listed_ = listed;
  before_.assign(1, 0);
  for (std::size_t first = 0; first < listed.size(); first += kPageTokens) {
    const auto page =
        listed.subspan(first, std::min<std::size_t>(kPageTokens, listed.size() - first));
    before_.push_back(std::accumulate(page.begin(), page.end(), before_.back()));
  }
}

std::int64_t ListedTokens::before(std::int64_t position) const {
  const std::int64_t page = position / kPageTokens;
  const auto begin = listed_.begin() + page * kPageTokens;
  return std::accumulate(begin, listed_.begin() + position,
                         before_[static_cast<std::size_t>(page)]);
}

std::int64_t ListedTokens::resident(const BlockTables& tables, std::int32_t sequence,
                                    std::int64_t first, std::int64_t end, int set) const {
  std::int64_t rows = 0;
  for (std::size_t page = 0; page + 1 < before_.size(); ++page) {
    const std::int64_t from = std::max(first, before_[page]);
    const std::int64_t to = std::min(end, before_[page + 1]);
    if (from >= to) continue;
    const PageSlots slots = tables.page(sequence, static_cast<std::int64_t>(page), set);
    if (slots.device != PageSlots::kNone) rows += to - from;
  }
  return rows;
}

}  // namespace sluice
