// The kernels for rows that many blocks share, and the scratch between them:
//   row_stats   maximum, sum and (top_p) threshold of every row
//   key_round   (top_k, or top_p with a cap) three radix rounds towards the lightest kept key
//   emit        positions in order, kept weights
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/launch.h"
#include "kernels/select_common.cuh"
#include "kernels/select_keys.cuh"

namespace sluice::cuda {

inline constexpr int kPieceThreads = 512;
inline constexpr int kPieceEntries = kPieceThreads * 32;
inline constexpr int kMostUnits = 512;  // per row
inline constexpr int kRing = 8192;      // bins of a unit's histogram before they repeat
inline constexpr int kKeyThreads = 512;
inline constexpr int kKeyChunk = kKeyThreads * 8;
inline constexpr int kKeyRounds = 3;
inline constexpr int kMostGroup = 64;

// What a unit, some pieces of one row, is found to hold.
struct UnitHead {
  float highest = 0.0f;
  float sum = 0.0f;   // of e^(x - highest)
  float kept = 0.0f;  // of them, always kept or in the tail
  float tail = 0.0f;
  std::int32_t top = 0;    // the bin of `highest`
  std::int32_t floor = 0;  // no entry in a lower bin is sure to be in the histogram
  std::uint32_t bad = 0;
  std::uint32_t unused = 0;
};

struct ChunkResult {
  std::int32_t wanted = 0;
  std::int32_t emitted = 0;
  std::int32_t pages = 0;
  std::int32_t first_page = 0;
  std::int32_t last_page = 0;
};

// A call, or the part of it for as many KV heads as go at once.
struct LargeCall {
  SelectCall call;
  std::int32_t units = 0;  // per row
  std::int32_t unit_pieces = 0;
  std::int32_t bins = 0;             // of a unit's histogram that are written, or 0: makes none
  std::int32_t chunks = 0;           // of emit, per KV head
  bool is_fine = false;              // such chunks are short
  std::int32_t key_chunks = 0;       // of kKeyChunk entries, per KV head
  std::int32_t key_loops = 0;        // such chunks per block
  std::uint32_t* tickets = nullptr;  // [2, kv_heads * group], zero on entry, left zero
  RowInfo* rows = nullptr;           // [kv_heads * group]
  Extent* extents = nullptr;         // [kv_heads]
  UnitHead* unit_heads = nullptr;    // [kv_heads * group, units]
  std::uint32_t* masses = nullptr;   // [kv_heads * group, units, bins], from the top down
  ChunkResult* results = nullptr;    // [kv_heads, chunks]
  float* alphas = nullptr;           // [kv_heads, chunks, group]
  std::uint32_t* keys = nullptr;     // [kv_heads, key_chunks * kKeyChunk] if group > 1
  // Zeroed by row_stats for the others:
  std::uint64_t* states = nullptr;    // [kv_heads, chunks]
  KeyCut* cuts = nullptr;             // [kv_heads]
  std::uint32_t* key_bins = nullptr;  // [kKeyRounds, kv_heads, kMostKeyBins]
  std::uint32_t* key_done = nullptr;  // [kKeyRounds, kv_heads]
  std::uint32_t* done = nullptr;      // [kv_heads]
  std::uint64_t* zeroed = nullptr;    // all of this, `zeroed_words` long
  std::int64_t zeroed_words = 0;
  bool has_keys = false;  // a cut by keys is made, or may be
};

// Entries of one of emit's chunks.
constexpr std::int32_t chunk_entries(bool is_fine) { return is_fine ? 2048 : 8192; }

void run_row_stats(const LargeCall& call, cudaStream_t stream);
void run_key_rounds(const LargeCall& call, cudaStream_t stream);
// `overlaps`: it may start before the kernel before it has ended.
void run_emit(const LargeCall& call, bool overlaps, cudaStream_t stream);

// One KV head per block, all of whose logits fit its shared memory.
bool fits_small(const SelectCall& call, const DeviceLimits& device);
void run_small(const SelectCall& call, cudaStream_t stream);

}  // namespace sluice::cuda
