// The request for a plan: the caller's sizes, policies and caps, and the backend that will run it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

// A cap on host memory, and what others under it take.
struct HostRoom {
  std::uint64_t cap = 0;
  std::uint64_t taken = 0;

  std::uint64_t left() const { return cap - std::min(cap, taken); }
};

// Where a plan may put rows that host memory does not hold.
struct DiskRoom {
  int directories = 1;
  std::uint64_t bytes = UINT64_MAX;
  // For pages, cached rows and rows on their way; without a device cap, for the device tier, too,
  // which is host memory then.
  HostRoom host;
};

// Requirements on a pool of sequences.
struct KvRequest {
  KvShape shape;
  BackendInfo on = {};  // that will run the pool
  // By layer: the newest tokens that it attends to; 0: all. Empty: all layers attend to all.
  std::vector<std::int64_t> windows = {};
  std::int64_t context = 0;    // tokens of one sequence
  std::int64_t chunk = 512;    // most tokens per step of a prompt
  std::int64_t sequences = 1;  // at a time
  std::int64_t tokens = 0;     // distinct, of all sequences (forks share); 0: sequences * context
  // Most tokens of all sequences whose index is on the device at a time; 0: all. At least
  // `context`, because a step needs the index of its whole sequence.
  std::int64_t indexed_tokens = 0;
  std::int64_t decode_batch = 1;  // most tokens per decode step; at least `sequences`
  bool reports_positions = false;
  std::span<const Policy> policies = {};    // that sessions may use; empty: dense
  const Scorers* scorers = &own_scorers();  // that policies may name
  bool has_value_basis = false;             // the pool will be given one, see ValueBasis
  std::optional<std::uint64_t> device_cap = std::nullopt;
  std::uint64_t beside = 0;  // other bytes that the device cap must hold
  // Most bytes for the row cache; unset: as many as pay off.
  std::optional<std::uint64_t> cache_memory = std::nullopt;
  // The host attends to part of the rows only in host memory; see
  // offload/attention/host_attention.h.
  bool host_attention = false;
  std::optional<DiskRoom> disk = std::nullopt;  // set: rows that are not resident lie on disk
};

}  // namespace sluice
