// The kernels for rows that many blocks share, and the scratch between them. In order:
//   sums          maximum and sum of every row, the maxima of its sectors, and bounds from them
//   shortlist     for a small k or cap: lists the entries that may be kept, picks the heaviest, and
//                 settles the heads whose bounds suffice
//   thresholds    for top_p: the lowest logit that each row keeps, from the sectors that may matter
//   shortlist     again, with these thresholds
//   grade_rounds  for a k or cap, in heads that are not settled: the lightest kept grade, by radix
//   emit          positions in order, and kept weights, of heads that are not settled
//
// Pieces of a row, from small to large: a sector (16 entries); a strip (1024, read by a warp at a
// time); a chunk of shortlist or a span of emit (the strips of a block, in all rows of a head); a
// unit (the strips of a block of sums, in one row). A sector is not read again if its maximum is
// too low.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/runtime/launch.h"
#include "kernels/runtime/ticket.cuh"
#include "kernels/select/common.cuh"
#include "kernels/select/grades.cuh"
#include "kernels/select/paths.cuh"

namespace sluice::cuda {

inline constexpr int kThreads = 256;
inline constexpr int kWarps = kThreads / kWarp;
inline constexpr int kSector = 16;
inline constexpr int kStrip = 1024;  // entries that a warp takes at a time
inline constexpr int kStripSectors = kStrip / kSector;
inline constexpr int kStripPages = kStrip / kPageTokens;
static_assert(kSector == kBoundTokens);
inline constexpr int kUnitStrips = kMassedEntries / kStrip;  // at most
inline constexpr int kMostUnits = 512;                       // per row
static_assert(std::int64_t{kUnitStrips} * kMostUnits * kStrip >= kMostEntries);
inline constexpr int kChunk = kWarps * kStrip;  // entries of a block of shortlist, at least
// A block of emit takes a span: up to kMostWarpStrips strips per warp.
inline constexpr int kMostWarpStrips = 2;
inline constexpr int kMostSpan = kWarps * kMostWarpStrips * kStrip;
inline constexpr int kMostShortlistChunks = kMostEntries / (2 * kChunk);
inline constexpr int kRoughBins = 2048;  // f16 numbers by their upper 11 bits
inline constexpr int kWrittenBins = 2 * kThreads;
inline constexpr int kGradeThreads = 512;
inline constexpr int kGradeChunk = kGradeThreads * 8;
inline constexpr int kGradeRounds = 3;

// Results of a unit, a few strips of one row.
struct alignas(16) UnitHead {
  float norm = 0.0f;
  float sum = 0.0f;   // of 2^(x log2(e) - norm)
  float kept = 0.0f;  // part of `sum`: entries always kept or in the tail
  float tail = 0.0f;
  float highest = 0.0f;
  std::uint32_t bad = 0;
  std::int32_t top = 0;  // rough bin of `highest`: from there down, kWrittenBins are written
};

// Bounds of a row's threshold and heaviest entries.
struct RowSearch {
  float missing = 0.0f;  // share that top_p needs beyond the tokens that are always kept
  float highest = 0.0f;
  std::int32_t lowest = 0;     // lowest bin of the threshold; kSettled: the threshold is known
  std::uint32_t reaching = 0;  // at most this many entries reach the threshold
  std::uint32_t sure = 0;      // at least this many entries are >= `most`
  std::uint16_t most = 0;      // f16, upper bound of the threshold
  std::uint16_t least = 0;     // f16, not above the `keep`-th largest logit

  static constexpr std::int32_t kSettled = INT32_MAX;
};

struct ChunkResult {
  std::int32_t emitted = 0;
  std::int32_t pages = 0;
  std::int32_t first_page = 0;
  std::int32_t last_page = 0;
};

// A call, or its part for the heads that run at once; rows are their query heads.
struct ChainCall {
  SelectCall call;
  std::int32_t strips = 0;  // per row
  std::int32_t units = 0;   // per row
  std::int32_t unit_strips = 0;
  std::int32_t bins = 0;                // of a row's histogram for top_p's threshold; 0: none
  std::int32_t chunks = 0;              // of kChunk entries, per head
  std::int32_t warp_strips = 0;         // per warp of emit
  std::int32_t spans = 0;               // of span_entries(), per head
  std::int32_t shortlist_strips = 0;    // per warp of shortlist
  std::int32_t shortlist_capacity = 0;  // candidates per head; 0: no shortlist
  std::int32_t grade_chunks = 0;        // of kGradeChunk entries, per head
  std::int32_t grade_loops = 0;         // chunks of kGradeChunk per block
  std::uint32_t* tickets = nullptr;     // [rows], zero on entry, left zero
  RowInfo* rows = nullptr;              // [rows]
  RowSearch* searches = nullptr;        // [rows]
  Extent* extents = nullptr;            // [heads]
  std::uint32_t* maxima = nullptr;      // f16 [heads, pages, group, kBoundsPerPage]
  std::int64_t pages = 0;               // per row, in whole strips
  UnitHead* unit_heads = nullptr;       // [rows, units]
  uint2* rough = nullptr;               // [rows, units, kRoughBins]: sectors, masses
  ChunkResult* results = nullptr;       // [heads, spans]
  float* alphas = nullptr;              // [heads, spans, group]
  // Candidates: [0] in the order in which blocks appended them, [1] ascending.
  std::uint32_t* listed_grades = nullptr;  // [2, heads, shortlist_capacity]
  std::int32_t* listed_entries = nullptr;  // [2, heads, shortlist_capacity]
  uint2* listed_chunks = nullptr;   // [heads, shortlist_chunks()]: offset and count of candidates
  std::uint32_t* grades = nullptr;  // [heads, grade_chunks * kGradeChunk] if group > 1
  // Zeroed by row_sums for the later kernels:
  std::uint64_t* masses = nullptr;         // [rows, bins], from the top down
  std::uint64_t* states = nullptr;         // [heads, spans], of emit
  std::uint32_t* listed = nullptr;         // [2, heads]: candidates
  GradeCut* cuts = nullptr;                // [heads]
  std::uint32_t* grade_bins = nullptr;     // [kGradeRounds, heads, kMostGradeBins]
  std::uint32_t* grade_done = nullptr;     // [kGradeRounds, heads]
  std::uint32_t* rounds_done = nullptr;    // [heads]
  std::uint32_t* rows_done = nullptr;      // [rows]
  std::uint32_t* chunks_listed = nullptr;  // [2, heads]
  std::uint32_t* done = nullptr;           // [heads]
  std::uint32_t* settled = nullptr;        // [heads]: 1 if shortlist has written the answer
  std::uint64_t* zeroed = nullptr;         // all these arrays, `zeroed_words` long
  std::int64_t zeroed_words = 0;

  __host__ __device__ std::int32_t span_entries() const { return kWarps * kStrip * warp_strips; }
  __host__ __device__ std::int32_t shortlist_chunks() const {
    return (chunks + shortlist_strips - 1) / shortlist_strips;
  }

  // The maxima of two neighbouring sectors, word `word` of a strip; the next query head's lie
  // kPageWords further.
  static constexpr int kPageWords = kBoundsPerPage / 2;
  __device__ std::uint32_t* strip_maxima(std::int32_t row, std::int32_t strip,
                                         std::int32_t word) const {
    const std::int64_t page = row / call.group * pages + strip * kStripPages + word / kPageWords;
    return maxima + (page * call.group + row % call.group) * kPageWords + word % kPageWords;
  }
};

// Returns true in the block that takes the last of `count` tickets; it sees all other blocks'
// writes.
__device__ __forceinline__ bool is_last_of(std::uint32_t* tickets, std::int32_t count) {
  __shared__ std::uint32_t is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = takes_last_ticket(tickets, count) ? 1 : 0;
  }
  __syncthreads();
  return is_last != 0;
}

// Loads the query heads' rows; returns true if one is bad.
__device__ inline bool load_infos(const ChainCall& call, std::int32_t head, RowInfo* rows) {
  const int group = call.call.group;
  bool bad = false;
  if (threadIdx.x < static_cast<unsigned>(group)) {
    const RowInfo row = call.rows[static_cast<std::int64_t>(head) * group + threadIdx.x];
    rows[threadIdx.x] = row;
    bad = row.bad != 0;
  }
  return __syncthreads_or(bad ? 1 : 0) != 0;
}

void run_row_sums(const ChainCall& call, const Launch& launch);
void run_row_thresholds(const ChainCall& call, const Launch& launch);
// Runs again with `is_exact` when thresholds are known, for the heads that their bounds did not
// settle.
void run_shortlist(const ChainCall& call, bool is_exact, const Launch& launch);
void run_grade_rounds(const ChainCall& call, const Launch& launch);
void run_emit(const ChainCall& call, const Launch& launch);

}  // namespace sluice::cuda
