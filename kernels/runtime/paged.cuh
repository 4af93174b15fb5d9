// sluice/batch.h for kernels. They cannot call the constexpr members of its structs, because the
// project is compiled without --expt-relaxed-constexpr.
#pragma once

#include "kernels/runtime/device_math.cuh"
#include "lib/backend/row_cache.h"
#include "sluice/batch.h"

namespace sluice::cuda {

// The page of a position and its offset in it. The division is unsigned, one instruction instead of
// four, because positions are not negative.
__device__ __forceinline__ int page_of(std::int32_t position) {
  return static_cast<int>(static_cast<unsigned>(position) / kPageTokens);
}
__device__ __forceinline__ int place_in_page(std::int32_t position) {
  return static_cast<int>(static_cast<unsigned>(position) % kPageTokens);
}

// The first position of a token's own page.
__device__ __forceinline__ std::int32_t page_first_of(const BatchToken& token) {
  return token.position - place_in_page(token.position);
}

// The page table of a sequence.
__device__ __forceinline__ const PageSlots* page_table_of(const PagedRows& rows,
                                                          std::int32_t sequence) {
  return rows.pages + sequence * rows.table_stride;
}

__device__ __forceinline__ bool is_on_device(const PageSlots& page) {
  return page.device != PageSlots::kNone;
}

// The rows of a KV head, of all slots.
struct HeadPools {
  const std::byte* device = nullptr;
  const std::byte* host = nullptr;

  HeadPools() = default;
  __device__ HeadPools(const PagedRows& rows, int head)
      : device(rows.device + head * rows.device_stride),
        host(rows.host + head * rows.host_stride) {}

  // The address from which the row of a position on this page is read: on the device if the page
  // has a slot there, else in mapped host memory.
  __device__ const std::byte* row_of(const PageSlots& page, std::int32_t position,
                                     std::int64_t row_bytes) const {
    const bool there = is_on_device(page);
    const std::int64_t row =
        std::int64_t{there ? page.device : page.host} * kPageTokens + place_in_page(position);
    return (there ? device : host) + row * row_bytes;
  }
};

__device__ __forceinline__ const std::byte* row_of(const PagedRows& rows, const PageSlots& page,
                                                   int head, std::int32_t position,
                                                   std::int64_t row_bytes) {
  return HeadPools(rows, head).row_of(page, position, row_bytes);
}

// The first row of a page of KV head `head`.
__device__ __forceinline__ const std::byte* page_rows(const PagedRows& rows, int head,
                                                      const PageSlots& page,
                                                      std::int64_t row_bytes) {
  return row_of(rows, page, head, 0, row_bytes);
}

// Requests an entry of a table; `to` is shared memory. See copy_async_commit().
__device__ __forceinline__ void copy_async_page(int2* to, const PageSlots* from) {
  static_assert(sizeof(PageSlots) == sizeof(int2));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;\n" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}

__device__ __forceinline__ void copy_async_place(int2* to, const PlacedRow* from) {
  static_assert(sizeof(PlacedRow) == sizeof(PageSlots));
  copy_async_page(to, reinterpret_cast<const PageSlots*>(from));
}

// Prefetches the part of a sequence's table for positions up to this one into the L2 cache. Called
// by the whole block.
__device__ __forceinline__ void prefetch_page_table(const PagedRows& rows,
                                                    const BatchToken& token) {
  constexpr int kLinePages = 128 / static_cast<int>(sizeof(PageSlots));
  const PageSlots* const table = page_table_of(rows, token.sequence);
  const int pages = page_of(token.position) + 1;
#pragma unroll 1
  for (int page = static_cast<int>(threadIdx.x) * kLinePages; page < pages;
       page += static_cast<int>(blockDim.x) * kLinePages) {
    asm volatile("prefetch.global.L2 [%0];\n" ::"l"(table + page));
  }
}

}  // namespace sluice::cuda
