// Reads rows that are scattered in memory.
#pragma once

#include <cstddef>

namespace sluice::cpu {

// Calls body(i, row) for `count` rows in order; row_at(i) returns a row's address. Later rows are
// prefetched, because the hardware prefetcher cannot predict their addresses.
void for_rows(std::size_t count, std::size_t row_bytes, const auto& row_at, const auto& body) {
  constexpr std::size_t kAheadRows = 8;
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t i = 0; i < count; ++i) {
    if (i + kAheadRows < count) {
      const std::byte* const later = row_at(i + kAheadRows);
      for (std::size_t at = 0; at < row_bytes; at += kLineBytes) __builtin_prefetch(later + at);
    }
    body(i, row_at(i));
  }
}

}  // namespace sluice::cpu
