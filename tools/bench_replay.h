// A cell of `sluice bench` without a model: attention of given queries over given rows, through
// sluice::KvCache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sluice/kv_cache.h"
#include "tools/bench_cell.h"
#include "tools/bench_rows.h"

namespace sluice::tools {

// Dense attention of the first sequence in the measured steps.
struct DenseStep {
  std::vector<float> out;  // [layers, query_heads, head_dim]
  std::vector<float> lse;  // [layers, query_heads], of the logits
};
using DenseOutputs = std::vector<DenseStep>;

// The rows of a cell.
struct ReplayRows {
  std::span<const BenchRows* const> sequences;  // each a sequence's; of one shape and dtypes
  std::int64_t first = 0;  // token that begins the context; those before it are left out
};

// The cache of a cell: `base` with the cell's sizes and its policy.
KvConfig cache_of(const KvConfig& base, const CellKey& key, const Policy& policy,
                  const BenchSteps& steps);

// Runs a cell. Rows of the context are appended in steps of a prompt, without attention; then every
// step appends the next token's and attends with its queries. Fills `dense` if it is empty and
// compares with it otherwise; null: nothing is compared. Throws what KvCache and reading the rows
// throw.
CellResult run_replay(const KvConfig& config, const CellKey& key, const BenchSteps& steps,
                      const ReplayRows& rows, DenseOutputs* dense, const CellWatch& watch = {});

}  // namespace sluice::tools
