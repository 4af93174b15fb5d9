// What choosing tokens takes on the device: which layers keep which part of the key index, and how
// large the work space is. Worked out from the policies that a session may use, before anything is
// allocated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/selection.h"
#include "sluice/policy.h"
#include "sluice/types.h"

namespace sluice {

struct LayerIndex {
  bool tiles = false;
  bool bounds = false;
  bool sums = false;  // of all values
};

struct IndexLayout {
  KvShape shape;
  std::int64_t context = 0;
  std::int64_t batch = 1;  // tokens decoded in one step
  LogitFormat logits;
  bool digested = false;  // some policy's logits are
  int bits = 4;
  std::vector<LayerIndex> layers;
  std::int64_t slots = 0;       // selections remembered at a time; 0: nothing ever selects
  std::int64_t selected = 0;    // most positions that a selection holds per KV head
  std::int64_t candidates = 0;  // likewise, before they are re-scored; 0: none are
  bool zipvl = false;           // some policy's prefill is sparse
  std::int64_t arena_rows = 0;  // selected rows per KV head attended at a time

  bool selects() const { return slots > 0; }
  std::int64_t pages() const { return context / kPageTokens; }
  // Logits per query head: one per token, or per candidate and token of the unfinished page.
  std::int64_t logit_stride() const;
  std::int64_t candidate_stride() const;
  std::size_t digest_bytes() const;  // of the former

  std::uint64_t index_bytes() const;   // tiles, bounds and sums of all layers
  std::uint64_t work_bytes() const;    // logits, their digest, positions and the arena
  std::uint64_t host_bytes() const;    // the host's copy of what the backend reports
  std::uint64_t report_bytes() const;  // of selections
  std::uint64_t bad_bytes() const;     // of keys that are no numbers
};

// Tokens that a policy's selector proposes among `count`: what it asks for, but at least twice what
// the pruner may keep, so that short contexts leave something to choose from; and besides them what
// is always kept.
std::int64_t candidates_of(const Policy& policy, std::int64_t count);

// Whether its estimates of all tokens come from tiles.
bool scans_tiles(const Policy& policy);

// A layout that serves every one of `policies`. Throws Error{usage} if one of them does not fit
// the shape or if two of them want different bits per key.
IndexLayout plan_index(const KvShape& shape, std::int64_t context, std::int64_t batch,
                       std::span<const Policy> policies, const LogitFormat& logits = {});

}  // namespace sluice
