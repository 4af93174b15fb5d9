// Where kernels find rows by page; what lib/batch.h says of it is for the host.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/batch.h"

namespace sluice::cuda {

// The pages of a sequence.
__device__ __forceinline__ const PageSlots* pages_of(const PagedRows& rows, std::int32_t sequence) {
  return rows.pages + sequence * rows.table_stride;
}

// The first row of a page of KV head `head`.
__device__ __forceinline__ const std::byte* page_rows(const PagedRows& rows, int head, PageSlots at,
                                                      std::int64_t row_bytes) {
  const std::int64_t page_bytes = kPageTokens * row_bytes;
  if (at.device != PageSlots::kNone) {
    return rows.device + head * rows.device_stride + at.device * page_bytes;
  }
  return rows.host + head * rows.host_stride + at.host * page_bytes;
}

}  // namespace sluice::cuda
