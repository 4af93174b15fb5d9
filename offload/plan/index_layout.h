// What choosing tokens takes on the device: which layers keep which part of the key index, and how
// large the work space is. Worked out from the policies that a session may use, before anything is
// allocated.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/backend/index_ops.h"
#include "offload/plan/planner.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

// Memory that a scorer has by itself, of one method; see IndexNeeds.
struct OwnIndex {
  Method method;
  std::size_t page_bytes = 0;      // rounded up to ScorerMemory::kAlignment
  std::size_t sequence_bytes = 0;  // likewise
};

struct LayerIndex {
  int bits = 0;  // per key channel, in key tiles; 0: there are none
  bool bounds = false;
  bool sums = false;   // of all values
  int value_bits = 0;  // in value tiles; 0: there are none
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
  std::vector<Own> own;  // of LayerIndex::own

  std::uint64_t sum() const;
};

// Bytes of the work space: what SparseAttention allocates, and KeyIndex of it `bad`.
struct SelectionBytes {
  std::size_t logits = 0;
  std::size_t digest = 0;            // of the former
  std::size_t page_weights = 0;      // of the digest
  std::size_t candidate_logits = 0;  // those of candidates that are scored again
  std::size_t lse = 0;
  std::size_t positions = 0;  // of all slots
  std::size_t candidates = 0;
  std::size_t token_sums = 0;
  std::size_t arena = 0;
  std::size_t report = 0;  // of selections
  std::size_t bad = 0;     // pages, by keys and by values that are NaN or Inf

  std::uint64_t sum() const;
};

struct IndexLayout {
  KvShape shape;
  std::int64_t context = 0;    // tokens of one sequence
  std::int64_t sequences = 1;  // at a time
  std::int64_t tiles = 0;      // of all sequences, per KV head
  std::int64_t batch = 1;      // tokens decoded in one step
  std::int64_t wave = 1;       // of them, tokens whose weights are estimated at a time
  LogitFormat logits;
  bool digested = false;  // some policy's logits are
  std::vector<LayerIndex> layers;
  // Layers that under some policy attend to what was selected, there or before them, and layers
  // that under some policy attend to everything, or to all that an eviction left.
  std::vector<bool> selecting;
  std::vector<bool> attending_all;
  std::int64_t slots = 0;          // selections remembered at a time; 0: nothing ever selects
  std::int64_t selected = 0;       // most positions that a selection holds per KV head
  bool reports_positions = false;  // there is a slot for every layer's selections, see slot()
  std::int64_t candidates = 0;     // likewise, before they are re-scored; 0: none are
  bool zipvl = false;              // some policy's prefill is sparse
  bool evicts = false;             // likewise, and forgets what it leaves out
  bool lists_pages = false;        // some policy's prefill attends to some pages only
  std::int64_t arena_rows = 0;     // selected rows per KV head attended at a time

  bool selects() const { return slots > 0; }
  // Layers that only ever attend to everything, if others select.
  std::vector<int> dense_layers() const;
  // Which selection is that of a layer's token.
  std::int64_t slot(int layer, std::int64_t token) const;
  // Pages that a sequence may have, and tiles of those that become whole.
  std::int64_t pages() const { return (context + kPageTokens - 1) / kPageTokens; }
  std::int64_t sequence_tiles() const {
    return (context / kPageTokens + kTilePages - 1) / kTilePages;
  }
  // Logits per query head: one per token, or per candidate and token of the unfinished page.
  std::int64_t logit_stride() const;
  std::int64_t candidate_stride() const;
  bool sums_values() const;   // in some layer
  bool keeps_values() const;  // likewise: in value tiles

  LayerIndexBytes layer_bytes(std::size_t layer) const;
  std::uint64_t index_bytes() const;       // of all layers
  SelectionBytes selection_bytes() const;  // none if nothing ever selects
  std::uint64_t host_bytes() const;        // the host's copy of what the backend reports
  // Of the tables of pages and tiles, and of a step's tokens.
  std::size_t page_table_bytes() const;
  std::size_t tile_table_bytes() const;
  std::size_t token_bytes() const;
  std::uint64_t table_bytes() const;  // of all three

 private:
  std::size_t report_bytes() const;
  std::size_t bad_bytes() const;
};

// Blocks for sequences that have `tokens` different ones together.
std::int64_t blocks_for(std::int64_t context, std::int64_t sequences, std::int64_t tokens);

// Tokens that a policy's selector proposes: what it asks for, but at least twice what the pruner
// may keep, so that short contexts leave something to choose from; and besides them what is always
// kept.
Quota candidates_of(const Policy& policy);

// Most rows per KV head that a token's selection has under a policy that selects.
std::int64_t most_selected(const Policy& policy, std::int64_t context, const Scorers& scorers);

// Whether select() is to weigh a layer's pages for attention to value tiles, in a context of so
// many tokens. What is scored again is selected too late for that.
bool weighs_pages(const LogitFormat& format, const Policy& policy, int layer, std::int64_t tokens);

// A policy's scorer in use.
ScorerUse use_of(const Policy& policy, const KvShape& shape);

// A layout that serves every one of the request's policies. Throws Error{usage} if one of them does
// not fit the shape or if two of them want a layer's keys or values in different bits, and
// Error{unsupported} if a scorer does not run on the processor.
IndexLayout plan_index(const KvRequest& request);

}  // namespace sluice
