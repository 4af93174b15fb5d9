// The start of every KV head's rows, and their number, small enough to be a kernel's argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lib/backend/index_ops.h"

#ifdef __CUDACC__
#define SLUICE_BOTH __host__ __device__
#else
#define SLUICE_BOTH
#endif

namespace sluice::cuda {

// A few heads may lie anywhere; any number may lie at equal distances. Members that every head
// needs come first, because a kernel waits for each cache line of its arguments.
struct HeadRows {
  static constexpr int kListed = 64;

  const std::byte* base = nullptr;
  std::int64_t stride = 0;  // bytes from head to head, if not listed
  bool is_listed = false;
  const std::byte* listed[kListed]{};  // used if `is_listed`

  SLUICE_BOTH const std::byte* operator[](int head) const {
    return is_listed ? listed[head] : base + head * stride;
  }
};

// Pointers of a call's heads as one HeadRows. Throws Error{unsupported} for more than kListed heads
// at unequal distances.
HeadRows head_rows(std::span<const std::byte* const> heads);
HeadRows head_rows(std::span<const RowSpan> heads);

// Rows of every head in this call: the same for all, or listed.
struct HeadCounts {
  std::int64_t uniform = 0;
  bool is_listed = false;
  std::int32_t listed[HeadRows::kListed]{};

  SLUICE_BOTH std::int64_t operator[](int head) const { return is_listed ? listed[head] : uniform; }
};

HeadCounts head_counts(std::span<const std::int64_t> heads);
HeadCounts head_counts(std::span<const RowSpan> heads);

}  // namespace sluice::cuda
