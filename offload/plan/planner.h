// Decides where the rows of a cache live, from its shape and the caps, before any allocation.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "lib/backend/index_ops.h"
#include "sluice/kv_cache.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"

namespace sluice {

// What a pool of sequences is asked to be.
struct KvRequest {
  KvShape shape;
  std::int64_t context = 0;       // tokens of one sequence
  std::int64_t chunk = 512;       // most tokens per step of a prompt
  std::int64_t sequences = 1;     // at a time
  std::int64_t tokens = 0;        // of all of them, where forks share some; 0: sequences * context
  std::int64_t decode_batch = 1;  // most tokens per decode step; at least `sequences`
  bool reports_positions = false;
  std::span<const Policy> policies = {};    // that sessions may use; none: dense
  const Scorers* scorers = &own_scorers();  // that they may name
  Processor processor = Processor::host;    // that the scorers have to run on
  std::optional<std::uint64_t> device_cap = std::nullopt;
  bool attends_host_rows = false;  // without a device cap the rows may stay in host memory
  LogitFormat logits = {};         // how the backend keeps estimates
  std::uint64_t beside = 0;        // what else the device cap has to hold
  // Bytes of rows that a step selects in a layer, from which on the backend gains by a row cache.
  std::uint64_t cached_bytes = 0;
  // For the row cache, at most; unset: what pays.
  std::optional<std::uint64_t> cache_memory = std::nullopt;
  // The host is to attend to part of what is only at home; see offload/host_attention.h.
  bool host_attention = false;
};

// What KvPool allocates of rows on the device; in a plan that has none, in host memory.
struct DeviceRowBytes {
  explicit DeviceRowBytes(const KvPlan& plan);

  std::uint64_t resident;  // and the newest pages
  std::uint64_t window;    // of a step's rows
  std::uint64_t stream;    // both buffers
  std::uint64_t compact;   // of important tokens
  std::uint64_t cache;     // the row cache, and what belongs to it

  std::uint64_t sum() const { return resident + window + stream + compact + cache; }
};

// What RowCache allocates.
struct RowCacheBytes {
  explicit RowCacheBytes(const KvPlan& plan);

  std::size_t rows = 0;
  std::size_t tags = 0;
  std::size_t heat = 0;
  std::size_t clock = 0;
  std::size_t places = 0;

  std::uint64_t sum() const { return rows + tags + heat + clock + places; }
};

// What HostAttention allocates. Of the device it is one array of gaps, all else is host memory.
struct HostAttentionBytes {
  explicit HostAttentionBytes(const KvPlan& plan);

  std::size_t gaps = 0;  // of either
  std::size_t tokens = 0;
  std::size_t table = 0;
  std::size_t queries = 0;  // as many as there are results
  std::size_t lse = 0;
  std::size_t times = 0;

  std::uint64_t host() const { return gaps + tokens + table + 2 * queries + lse + times; }
};

// Whether a number that a caller brought is one of these.
constexpr bool is_known(DType dtype) { return dtype <= DType::bf16; }

// Throws Error{usage} unless a plan may be for so many tokens.
void require_context(std::int64_t tokens);

// Throws Error{usage} for a shape, context or policy out of range, Error{memory} if `device_cap` is
// too small to run at all.
KvPlan plan_kv(const KvRequest& request);

// Bytes of a region's rows, rounded to what the host store commits.
std::uint64_t host_region_bytes(const KvShape& shape, std::int64_t rows);

}  // namespace sluice
