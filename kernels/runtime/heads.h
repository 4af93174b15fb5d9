// Where every KV head's rows are, small enough to be a kernel's argument.
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

// Rows of KV heads at equal distances.
struct HeadRows {
  const std::byte* base = nullptr;
  std::int64_t stride = 0;  // bytes from head to head
  std::int64_t count = 0;   // rows of each head, if the call has a number of them

  SLUICE_BOTH const std::byte* operator[](int head) const { return base + head * stride; }
};

// The spans, or the first rows, of a call's heads as one HeadRows.
HeadRows head_rows(std::span<const RowSpan> heads);
HeadRows head_rows(std::span<std::byte* const> heads);

}  // namespace sluice::cuda
