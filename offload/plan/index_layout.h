// Device memory for choosing tokens: the parts of the key index that each layer keeps, and the size
// of the work space. Computed from the policies that a session may use, before any allocation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/backend/index_ops.h"
#include "offload/plan/request.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

// Private memory of one method's scorer; see IndexNeeds.
struct OwnIndex {
  Method method;
  std::size_t page_bytes = 0;      // rounded up to ScorerMemory::kAlignment
  std::size_t sequence_bytes = 0;  // rounded up the same
};

// Layers that choose their rows early need memory of their own for what later work of the layer, or
// of the layer before, would overwrite.
struct EarlyBytes {
  // Log-sum-exps of the queries that chose rows: [2, batch, query_heads], layers in turns.
  std::size_t lse = 0;
  std::size_t weighed = 0;  // the unused selection of weighing: [wave, kv_heads] positions
  std::size_t alpha = 0;    // and its alpha: [wave, query_heads]
  // Work space that is used beside the layer before, if some layer chooses a whole layer early.
  std::size_t logits = 0;
  std::size_t digest = 0;
  std::size_t candidate_logits = 0;
  std::size_t candidates = 0;

  std::size_t sum() const {
    return lse + weighed + alpha + logits + digest + candidate_logits + candidates;
  }
};

struct LayerIndex {
  int bits = 0;          // per key channel, in key tiles; 0: no key tiles
  bool rotated = false;  // key tiles
  bool bounds = false;
  bool sums = false;         // of all values
  int value_bits = 0;        // in value tiles; 0: no value tiles
  bool half_values = false;  // value tiles hold head_dim / 2 components, by a basis
  std::vector<OwnIndex> own;
};

// Bytes of a layer's part of the index, for all sequences and KV heads: what KeyIndex allocates.
struct LayerIndexBytes {
  std::size_t codes = 0;
  std::size_t scales = 0;
  std::size_t bounds = 0;
  std::size_t values = 0;
  std::size_t sums = 0;
  struct Own {
    std::size_t pages = 0;
    std::size_t sequences = 0;
  };
  std::vector<Own> own;  // in the order of LayerIndex::own

  std::uint64_t sum() const;
};

// Bytes of the work space: SparseAttention allocates it, except `bad`, which KeyIndex allocates.
struct SelectionBytes {
  std::size_t logits = 0;
  std::size_t digest = 0;            // of logits
  std::size_t page_weights = 0;      // of digest
  std::size_t candidate_logits = 0;  // of candidates that are scored again
  std::size_t lse = 0;
  std::size_t positions = 0;  // of all slots
  std::size_t early = 0;      // a second set of the above but positions, see EarlyBytes
  std::size_t candidates = 0;
  std::size_t token_sums = 0;
  std::size_t arena = 0;
  std::size_t report = 0;  // of selections
  std::size_t bad = 0;     // flags of pages with NaN or Inf keys or values

  std::uint64_t sum() const;
};

struct IndexLayout {
  KvShape shape;
  std::int64_t context = 0;    // tokens of one sequence
  std::int64_t sequences = 1;  // at a time
  std::int64_t tiles = 0;      // on the device, per KV head
  std::int64_t all_tiles = 0;  // of all sequences; those that are not on the device are parked
  std::int64_t batch = 1;      // tokens decoded in one step
  std::int64_t wave = 1;       // tokens of the batch whose weights are estimated at a time
  LogitFormat logits;
  bool digested = false;  // some policy's logits are digested
  std::vector<LayerIndex> layers;
  // Layers that attend to a selection, their own or an earlier layer's, under some policy; and
  // layers that attend to everything under some policy.
  std::vector<bool> selecting;
  std::vector<bool> attending_all;
  std::vector<bool> windowed;      // layers that attend to a window of the newest tokens
  std::int64_t slots = 0;          // selections remembered at a time; 0: nothing ever selects
  std::int64_t selected = 0;       // most positions that a selection holds per KV head
  bool reports_positions = false;  // every layer's selections have a slot, see slot()
  std::int64_t candidates = 0;     // most per KV head before re-scoring; 0: no re-scoring
  bool early = false;              // some layer of some policy chooses its rows early
  bool whole_layer_early = false;  // a whole layer early
  bool zipvl = false;              // some policy's prefill is sparse
  bool evicts = false;             // some sparse prefill evicts: every layer has its own tables
  bool lists_pages = false;        // some policy's prefill attends to some pages only
  std::int64_t arena_rows = 0;     // selected rows per KV head attended at a time

  bool selects() const { return slots > 0; }
  // Layers that attend to everything under all policies, if others select or have a window and
  // layers share their tables.
  std::vector<int> dense_layers() const;
  // The slot of a token's selection in a layer.
  std::int64_t slot(int layer, std::int64_t token) const;
  // Most pages of a sequence, and most tiles: only whole pages have tiles.
  std::int64_t pages() const { return (context + kPageTokens - 1) / kPageTokens; }
  std::int64_t sequence_tiles() const {
    return (context / kPageTokens + kTilePages - 1) / kTilePages;
  }
  // Logits per query head: one per token, or per candidate and token of the unfinished page.
  std::int64_t logit_stride() const;
  std::int64_t candidate_stride() const;
  bool sums_values() const;  // in some layer
  // Sums beside those of sequences: of one sequence, from before a step of several of its tokens.
  std::int64_t kept_sums() const { return batch > 1 ? 1 : 0; }
  bool keeps_values() const;   // in value tiles, in some layer
  bool halves_values() const;  // some layer's value tiles take a basis
  // Bytes of a page of a layer's value tiles, of one KV head.
  std::size_t value_page_bytes(std::size_t layer) const;

  LayerIndexBytes layer_bytes(std::size_t layer) const;
  std::uint64_t index_bytes() const;  // of all layers
  std::uint64_t tile_bytes() const;   // of a tile in all layers and KV heads
  // Most tiles that are parked at a time, and their bytes in host memory: a tile is parked only
  // where all of the device's are taken or are about to be, and another before one comes back.
  std::int64_t parked_tiles() const { return all_tiles > tiles ? all_tiles - tiles + 1 : 0; }
  std::uint64_t parked_bytes() const;
  SelectionBytes selection_bytes() const;  // 0 if nothing ever selects
  EarlyBytes early_bytes() const;          // 0 if nothing chooses early
  std::uint64_t host_bytes() const;        // the host's copy of what the backend reports
  // Bytes of the page tables, the tile tables and a step's tokens.
  std::size_t page_table_bytes() const;
  std::size_t tile_table_bytes() const;
  std::size_t token_bytes() const;
  std::uint64_t table_bytes() const;  // of all three

 private:
  std::size_t report_bytes() const;
  std::size_t bad_bytes() const;
};

// Tokens that a policy's selector proposes: its own quota, but at least twice the most that the
// pruner may keep, so that short contexts leave a choice; plus the tokens that are always kept.
Quota candidates_of(const Policy& policy);

// Most rows per KV head in a token's selection under a policy that selects.
std::int64_t most_selected(const Policy& policy, std::int64_t context, const Scorers& scorers);

// Returns true if select() must weigh a layer's pages for attention to value tiles, in a context of
// `tokens` tokens. False if candidates are scored again, because they are selected too late for it.
bool weighs_pages(const LogitFormat& format, const Policy& policy, int layer, std::int64_t tokens);

// A policy's scorer in use. `context`: tokens of one sequence.
ScorerUse use_of(const Policy& policy, const KvShape& shape, std::int64_t context);

// The policy as layers with a window take it: they attend to their window, which is few rows,
// whatever it says of them.
Policy within_windows(Policy policy, std::span<const std::int64_t> windows);

// A layout that serves every one of the request's policies. Throws Error{usage} if one of them does
// not fit the shape or if two of them want a layer's keys or values in different bits, its values
// in all and in half of their components, or its keys rotated and not; Error{unsupported} if a
// scorer does not run on the processor, a policy chooses among tokens that a layer's window may
// hide, or there is no basis for half of the components.
IndexLayout plan_index(const KvRequest& request);

}  // namespace sluice
