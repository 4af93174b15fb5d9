// Which tiles a warp scans: the tiles of all tokens and KV heads in order, shared out among warps.
#pragma once

#include "kernels/runtime/page_digest.h"
#include "kernels/scan/channels.h"
#include "kernels/scan/tile_queries.cuh"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {

inline constexpr int kScanWarps = 4;          // of a block
inline constexpr int kScanBlocks = 4;         // of a multiprocessor
inline constexpr int kLeastDynamicTiles = 6;  // of a warp: fewer are shared out evenly

// Heads are the KV heads of all tokens, [tokens, kv_heads].
struct TileScanArgs {
  const BatchToken* tokens;   // [token_count], up to kScanTokens
  const std::int32_t* table;  // [sequences, table_stride]: slots of tiles
  std::int64_t table_stride;
  int token_count;
  int kv_heads;
  TileQueries queries;
  const std::byte* codes;         // [kv_heads, slots, head_dim, kTilePages, code bytes]
  const std::uint16_t* scales;    // f16 [kv_heads, slots, kTilePages, 2, head_dim]
  const std::int32_t* positions;  // [heads, position_capacity], of candidates
  __half* logits;                 // [heads, group, stride]
  PageDigest digest;              // of the logits, or null pointers
  std::int64_t slots;             // of a KV head
  std::int64_t position_capacity;
  std::int64_t stride;
  std::int64_t most_tiles;  // that a head may have
  int head_dim;
  int steps;
  int pairs;  // of steps
  int group;
  int first_query;
  int query_count;
  bool aligned;         // logits of a page begin on 16 bytes
  bool has_candidates;  // only tiles with a candidate are scanned
};

// What is scanned: all channels of every tile or only of those with a candidate, or channels that
// are listed, which may be either; or so few listed ones of every tile that they are one chunk.
enum class TileScan { all, candidates, listed, few };

template <TileScan kScan>
inline constexpr bool kLists = kScan == TileScan::listed || kScan == TileScan::few;

template <TileScan kScan>
__device__ __forceinline__ bool has_candidates(const TileScanArgs& a) {
  return kScan == TileScan::listed ? a.has_candidates : kScan == TileScan::candidates;
}

// What a block knows of the tokens, in shared memory.
struct ScanTokens {
  std::int32_t first[kScanTokens];     // a token's first tile among those of all
  std::int32_t pages[kScanTokens];     // its whole ones
  std::int32_t sequence[kScanTokens];  // its row of the table
  int total;                           // tiles
  int even;                            // of them, shared out evenly from the start

  // Of each KV head of a token.
  __device__ __forceinline__ int tiles(int token) const {
    return (pages[token] + kTilePages - 1) / kTilePages;
  }
};

// By all threads of a block; ends with a barrier. `eighths` of the tiles are shared out evenly if
// they are many.
__device__ __forceinline__ void find_tokens(const TileScanArgs& a, int eighths, ScanTokens& to) {
  static_assert(kScanTokens % kWarp == 0);
  if (threadIdx.x < kWarp) {
    int total = 0;
#pragma unroll 1
    for (int t = lane_id(); t - lane_id() < a.token_count; t += kWarp) {
      const BatchToken token = t < a.token_count ? a.tokens[t] : BatchToken{};
      to.pages[t] = token.position / kPageTokens;
      to.sequence[t] = token.sequence;
      const int own = to.tiles(t) * a.kv_heads;
      const int up_to = total + warp_inclusive(own);
      to.first[t] = up_to - own;
      total = __shfl_sync(kAllLanes, up_to, kWarp - 1);
    }
    // Every counter needs warps that ask it.
    const auto blocks = static_cast<int>(gridDim.x);
    const bool dynamic =
        total >= kLeastDynamicTiles * kScanWarps * blocks && blocks >= kRunCounters;
    to.total = total;
    to.even = dynamic ? total * eighths / 8 : total;
  }
  __syncthreads();
}

// A tile of a head.
struct TilePlace {
  int head = -1;
  int last_page = -1;  // of the head's, the tile's last one that is there; -1: there is no tile

  __device__ __forceinline__ int tile() const { return last_page / kTilePages; }
};

// Tiles of a warp. Most are shared out evenly in advance; the rest is taken one by one, so that all
// warps end together although some get on faster. The counter is asked for a tile ahead, for its
// answer takes long; so is the table of slots.
template <TileScan kScan>
class TileRuns {
 public:
  __device__ TileRuns(const TileScanArgs& a, const ScanTokens& tokens) : a_(a), tokens_(tokens) {
    const auto warps = static_cast<int>(gridDim.x * kScanWarps);
    auto warp = static_cast<int>(blockIdx.x * kScanWarps + threadIdx.x / kWarp);
    if (tokens.even < warps) {  // then every block has some
      warp = static_cast<int>(threadIdx.x / kWarp * gridDim.x + blockIdx.x);
    }
    const int each = tokens.even / warps;
    const int more = tokens.even % warps;  // warps that have one more
    left_ = each + (warp < more ? 1 : 0);
    if (left_ == 0) return;
    go_to(each * warp + min(warp, more));
    look_up();
  }

  // Once what is made ready for a scan is there: before the first tile if there are candidates, and
  // before those that are shared out in advance are left behind.
  __device__ __forceinline__ void begin() {
    ask();
    look_for_candidates();
  }
  // Whether there is a tile, the next one to scan.
  __device__ __forceinline__ bool find() {
    if (has_candidates<kScan>(a_)) skip();
    return left_ > 0;
  }
  __device__ __forceinline__ void step() {
    ++tile_;
    int number = -1;  // of a tile elsewhere
    if (--left_ == 0) {
      number = take();
    } else if (tile_ == tokens_.tiles(token_)) {
      number = tokens_.first[token_] + (kv_head_ + 1) * tile_;
    }
    if (number >= 0) go_to(number);
    if (left_ == 0) return;
    look_up();
    look_for_candidates();
  }

  __device__ __forceinline__ TilePlace place() const {
    const int last = min(tile_ * kTilePages + kTilePages, tokens_.pages[token_]) - 1;
    return {token_ * a_.kv_heads + kv_head_, last};
  }
  // Its number in the index.
  __device__ __forceinline__ std::int64_t in_index() const { return kv_head_ * a_.slots + slot_; }

 private:
  // To tile `number` of all.
  __device__ __forceinline__ void go_to(int number) {
    int low = 0;
    int high = a_.token_count - 1;
#pragma unroll 1
    while (low < high) {  // for the last token that begins there or before; others are empty
      const int middle = (low + high + 1) / 2;
      if (tokens_.first[middle] <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    token_ = low;
    const int tiles = tokens_.tiles(low);
    tile_ = number - tokens_.first[low];
    kv_head_ = tile_ / tiles;
    tile_ -= kv_head_ * tiles;
  }
  // Asks for the tile's slot, long before the answer is needed.
  __device__ __forceinline__ void look_up() {
    slot_ = a_.table[tokens_.sequence[token_] * a_.table_stride + tile_];
  }
  // Likewise for its first candidate.
  __device__ __forceinline__ void look_for_candidates() {
    if (!has_candidates<kScan>(a_) || left_ == 0) return;
    first_ = a_.queries.first[place().head * a_.most_tiles + tile_];
  }
  // To the next tile with a candidate.
  __device__ __forceinline__ void skip() {
    while (left_ > 0 && first_ < 0) step();
  }
  __device__ __forceinline__ void ask() {
    if (tokens_.even < tokens_.total && lane_id() == 0) {
      upcoming_ = atomicAdd(a_.queries.counters + blockIdx.x % kRunCounters, 1u);
    }
  }
  // The number of one more tile, or -1.
  __device__ __forceinline__ int take() {
    if (tokens_.even == tokens_.total) return -1;
    const unsigned run =
        __shfl_sync(kAllLanes, upcoming_, 0) * kRunCounters + blockIdx.x % kRunCounters;
    const std::int64_t taken = tokens_.even + std::int64_t{run};
    if (taken >= tokens_.total) return -1;
    ask();
    left_ = 1;
    return static_cast<int>(taken);
  }

  const TileScanArgs& a_;
  const ScanTokens& tokens_;
  int token_ = 0;
  int kv_head_ = 0;
  int tile_ = 0;  // of the head's
  std::int32_t slot_ = 0;
  int left_ = 0;
  unsigned upcoming_ = 0;
  std::int32_t first_ = 0;
};

}  // namespace sluice::cuda
