// Decides where the rows of a cache live, from its shape and the caps, before any allocation.
#pragma once

#include <cstdint>
#include <optional>

#include "offload/plan/request.h"
#include "sluice/errors.h"
#include "sluice/kv_cache.h"

namespace sluice {

// Bytes that KvPool allocates for rows in the device tier; without a device that is host memory.
struct DeviceRowBytes {
  explicit DeviceRowBytes(const KvPlan& plan);

  std::uint64_t resident;  // and the newest pages
  std::uint64_t window;    // of a step's rows
  std::uint64_t stream;    // both buffers
  std::uint64_t compact;   // of important tokens
  std::uint64_t prompt;    // of one layer of a prompt that evicts
  std::uint64_t cache;     // the row cache with its tables

  std::uint64_t sum() const { return resident + window + stream + compact + prompt + cache; }
};

// Bytes that RowCache allocates.
struct RowCacheBytes {
  explicit RowCacheBytes(const KvPlan& plan);

  std::size_t rows = 0;
  std::size_t tags = 0;
  std::size_t heat = 0;
  std::size_t clock = 0;
  std::size_t places = 0;

  std::uint64_t sum() const { return rows + tags + heat + clock + places; }
};

// Bytes that HostAttention allocates: one array of gaps on the device, the rest in host memory.
struct HostAttentionBytes {
  explicit HostAttentionBytes(const KvPlan& plan);

  std::size_t gaps = 0;  // on the device, and again in host memory
  std::size_t tokens = 0;
  std::size_t table = 0;
  std::size_t queries = 0;  // and again for the results
  std::size_t lse = 0;
  std::size_t times = 0;

  std::uint64_t host() const { return gaps + tokens + table + 2 * queries + lse + times; }
};

// Returns true if a caller's number is a dtype that the cache knows.
constexpr bool is_known(DType dtype) { return dtype <= DType::bf16; }
constexpr bool is_known(const RowFormat& rows) {
  return rows.code <= kLastRowCode && is_known(rows.element);
}

// Throws Error{usage} unless a plan may have a context of `tokens` tokens.
void require_context(std::int64_t tokens);

// Throws Error{usage} for a shape, context or policy out of range, Error{memory} if a cap is too
// small to run at all, Error{unsupported} for a policy that cannot leave its rows on disk.
KvPlan plan_kv(const KvRequest& request);

// Plans without a disk, and if memory does not suffice for that, with the one that `disk` returns.
// `accept` throws Error{memory} for a plan that does not fit what the caller knows of.
template <class Disk, class Accept>
KvPlan plan_with_disk(KvRequest request, bool has_disk, Disk disk, Accept accept) {
  try {
    const KvPlan plan = plan_kv(request);
    accept(plan);
    return plan;
  } catch (const Error& error) {
    if (!has_disk || error.code() != ErrorCode::memory) throw;
  }
  request.disk = disk();
  const KvPlan plan = plan_kv(request);
  accept(plan);
  return plan;
}

// The room of a disk for sessions that may take what `host` leaves; unset: half of what the limits
// of the process leave beside `taken` bytes.
DiskRoom disk_room(const DiskConfig& disk, const std::optional<HostRoom>& host,
                   std::uint64_t taken);

// Bytes of a region's rows, rounded to the host store's commit unit.
std::uint64_t host_region_bytes(const KvShape& shape, std::int64_t rows);

}  // namespace sluice
