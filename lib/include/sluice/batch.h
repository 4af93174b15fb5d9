// The input of one step: the tokens that it decodes, and the location of their sequences' rows.
//
// Everything that changes from token to token lies in the backend's memory, because a recorded step
// is replayed with the same pointers, counts and capacities.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sluice/types.h"

namespace sluice {

// A token that a step decodes. It sees the tokens of its sequence up to its own position.
struct BatchToken {
  std::int32_t sequence = 0;  // row in the page tables
  std::int32_t position = 0;  // in the sequence

  // Tokens of the sequence that it attends to, itself included.
  constexpr std::int64_t count() const { return std::int64_t{position} + 1; }
  // Whole pages before its own; its own page is always attended.
  constexpr std::int64_t pages() const { return position / kPageTokens; }
  constexpr std::int64_t page_first() const { return pages() * kPageTokens; }
};

// The tokens of a step, usually one per sequence. Several tokens of one sequence are adjacent in
// the batch and have consecutive positions.
struct TokenBatch {
  const BatchToken* tokens = nullptr;  // the backend's memory, [count]
  std::int64_t count = 0;
  std::int64_t capacity = 0;  // every position is below it; launches are sized by it
};

// Most tokens of a decode step.
inline constexpr std::int64_t kMostBatch = 64;

// Pages of a sequence that share one slot of the key index. Their key tiles are adjacent there,
// because slices of channels are then read in runs twice as long.
inline constexpr int kTilePages = 2;

// The location of one page of a sequence. Its block's number is `host`: the slot in host memory and
// the place on disk, whichever has the rows that are not resident.
struct PageSlots {
  static constexpr std::int32_t kNone = -1;  // the page is not in that tier

  std::int32_t device = kNone;
  std::int32_t host = kNone;
};

// Rows of one layer, for all sequences of a pool. Rows are read from the device if resident there,
// else from host memory; they are written to every tier in which their page has a slot.
struct PagedRows {
  // [kv_heads, slots, kPageTokens, row_bytes], with `*_stride` bytes from KV head to KV head; null
  // if there is no such tier, or the reader cannot access it.
  std::byte* device = nullptr;
  std::byte* host = nullptr;
  std::int64_t device_stride = 0;
  std::int64_t host_stride = 0;
  const PageSlots* pages = nullptr;  // the backend's memory, [sequences, table_stride]
  std::int64_t table_stride = 0;     // pages that a sequence may have

  // The address of a page's first row, given its slot in a tier's pool.
  constexpr std::byte* in_device(std::int64_t head, std::int64_t slot,
                                 std::int64_t row_bytes) const {
    return device + head * device_stride + slot * kPageTokens * row_bytes;
  }
  constexpr std::byte* in_host(std::int64_t head, std::int64_t slot, std::int64_t row_bytes) const {
    return host + head * host_stride + slot * kPageTokens * row_bytes;
  }
  constexpr const PageSlots& page(std::int64_t sequence, std::int64_t number) const {
    return pages[sequence * table_stride + number];
  }
  constexpr bool is_on_device(const PageSlots& page) const {
    return device != nullptr && page.device != PageSlots::kNone;
  }
  constexpr bool is_in_host(const PageSlots& page) const {
    return host != nullptr && page.host != PageSlots::kNone;
  }
  // The address from which a position's row is read. Callable only where `pages` can be
  // dereferenced.
  constexpr const std::byte* row(std::int64_t sequence, std::int64_t head, std::int64_t position,
                                 std::int64_t row_bytes) const {
    const PageSlots& at = page(sequence, position / kPageTokens);
    const std::byte* const first = is_on_device(at) ? in_device(head, at.device, row_bytes)
                                                    : in_host(head, at.host, row_bytes);
    return first + position % kPageTokens * row_bytes;
  }
};

}  // namespace sluice
