// Work space of prompts that do not attend to every row: its bytes, so that a plan can count them
// before ImportantTokens and ListedPages allocate them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "offload/plan/index_layout.h"
#include "sluice/kv_cache.h"
#include "sluice/types.h"

namespace sluice {

// Tokens whose queries decide which tokens of a prompt are important.
inline constexpr std::int64_t kNewestProbes = ChooseTokensParams::kNewest;
inline constexpr std::int64_t kRandomProbes = 64;
// Important tokens of a chunk that attend at a time, when only they do.
inline constexpr std::int64_t kPackedTokens = 1024;

// Allocations of ImportantTokens, except its room for rows.
struct ImportantTokenBytes {
  explicit ImportantTokenBytes(const IndexLayout& layout);

  std::size_t probe_queries;
  std::size_t sums;
  std::size_t listed;
  std::size_t positions;
  std::size_t seen;
  std::size_t packed;      // queries, and again for outputs; 0 if no policy evicts
  std::size_t packed_lse;  // 0 if no policy evicts
  std::size_t table;       // of the staged rows; 0 if no policy evicts
  std::size_t bad;         // host memory

  // Bytes where attention reads.
  std::uint64_t work() const;
  // Bytes in host memory, which has a copy of the list.
  std::uint64_t host() const { return listed + bad; }
};

// Allocations of ListedPages; 0 for a plan without lists.
struct ListedPageBytes {
  explicit ListedPageBytes(const KvPlan& plan);

  std::size_t means = 0;
  std::size_t pages = 0;
  std::size_t counts = 0;
  std::size_t listed = 0;  // and again in host memory

  std::uint64_t work() const { return pages + counts + listed; }
};

}  // namespace sluice
