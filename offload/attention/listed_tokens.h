// The host's view of a list of positions of one sequence: counts by position and by tier.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "offload/tiers/block_tables.h"

namespace sluice {

class ListedTokens {
 public:
  // `listed`: 1 for every position on the list, else 0; it must outlive this.
  void count(std::span<const std::uint8_t> listed);

  std::int64_t count() const { return before_.back(); }
  // Listed positions below `position`, which may be at most the number of positions.
  std::int64_t before(std::int64_t position) const;
  // Entries [first, end) of the list whose rows are on the device in the layers of a set.
  std::int64_t resident(const BlockTables& tables, std::int32_t sequence, std::int64_t first,
                        std::int64_t end, int set) const;

 private:
  std::span<const std::uint8_t> listed_;
  std::vector<std::int64_t> before_ = {0};  // listed positions before each page, and in total
};

}  // namespace sluice
