// The host's view of a list of positions of one sequence: how many of them lie where.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "offload/tiers/block_tables.h"

namespace sluice {

class ListedTokens {
 public:
  // `listed`: for every position 1 if it is, else 0; it must outlive this.
  void count(std::span<const std::uint8_t> listed);

  std::int64_t count() const { return before_.back(); }
  // Listed positions below `position`, at most as many as there are positions.
  std::int64_t before(std::int64_t position) const;
  // Of numbers [first, end) of the list, those whose rows the layers of a set have on the device.
  std::int64_t resident(const BlockTables& tables, std::int32_t sequence, std::int64_t first,
                        std::int64_t end, int set) const;

 private:
  std::span<const std::uint8_t> listed_;
  std::vector<std::int64_t> before_ = {0};  // every page, and all of them
};

}  // namespace sluice
