// Scans of so few listed channels, for so few queries, that a warp has room to spare: a chunk has
// all channels of a tile, so that sums over half its tokens are complete before those over the
// other half begin, and what scans of more channels keep in shared memory of the queries fits
// registers.
#pragma once

#include "kernels/scan/tiles.cuh"

namespace sluice::cuda {

using FewShape = TileShape<4, true>;

// What a lane needs of the KV head whose tiles it scans.
struct FewQueries {
  HeadQueries<1> head;
  uint4 fragments;
  uint4 selectors;
};

__device__ __forceinline__ FewQueries enter_few(const TileScanArgs& a, int head) {
  FewQueries of;
  of.head = enter_head<4, false, kSharedQueries>(a, head, {});
  of.fragments = __ldg(of.head.fragments);
  of.selectors = __ldg(a.queries.selectors + head * 4 + lane_id() % 4);
  return of;
}

// Logits of this lane's queries and page of the tile in `slot`.
template <int kSteps>
__device__ __forceinline__ void scan_slot(std::uint32_t slot, const LaneOffsets<4, true>& offsets,
                                          const FewQueries& queries, Runs<4> (&runs)[2]) {
  float zeros[4]{};
  uint2 weights[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    weights[s] = begin_step(slot, offsets, s, of_step(queries.fragments, s),
                            of_step(queries.selectors, s), zeros);
  }
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    WordSums<4> sums{};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      Words words[kTilePages];
#pragma unroll
      for (int p = 0; p < kTilePages; ++p) words[p] = load_words(slot, offsets, s, p, word);
      multiply_word<4>(words, weights[s], sums);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      find_of_word<4>(sums, word, zeros, side, queries.head.factors[0][side], runs[side]);
    }
  }
}

// What a warp has in shared memory: its ring, and of its head the places of what it copies.
inline constexpr std::uint32_t kFewBytes =
    FewShape::kRingBytes + kWarp * (sizeof(uint4) + sizeof(std::uint32_t));

__device__ __forceinline__ WarpMemory few_memory(std::byte* bytes) {
  WarpMemory memory{};
  memory.ring = bytes;
  memory.places = reinterpret_cast<uint4*>(bytes + FewShape::kRingBytes);
  memory.scales = reinterpret_cast<std::uint32_t*>(memory.places + kWarp);
  return memory;
}

// Scans and stores the tiles of one warp.
template <int kSteps>
__device__ __forceinline__ void scan_few(const TileScanArgs& a, const ScanTokens& tokens,
                                         const WarpMemory& memory) {
  ListedCopier<4, TileScan::few> copier(a, tokens, memory);
  wait_for_kernel_before();
  copier.begin();
#pragma unroll 1
  for (int i = 0; i < FewShape::kAhead; ++i) copier.copy_next();
  const LaneOffsets<4, true> offsets;
  const std::uint32_t first_slot = shared_address(memory.ring);
  std::uint32_t slot = first_slot;
  TilePlace at;
  FewQueries queries{};
  while (copier.oldest().last_page >= 0) {
    if (copier.oldest().head != at.head) queries = enter_few(a, copier.oldest().head);
    at = copier.oldest();
    copier.wait(0, 0);
    __syncwarp();
    copier.copy_next();
    Runs<4> runs[2];
    scan_slot<kSteps>(slot, offsets, queries, runs);
    const int page = at.tile() * kTilePages + page_of_lane();
    store_runs<4, true>(runs, a, queries.head.logits + std::int64_t{page} * kPageTokens,
                        first_column<kSharedQueries>(), at, page);
    slot += FewShape::kSlotBytes;
    if (slot == first_slot + FewShape::kRingBytes) slot = first_slot;
  }
}

}  // namespace sluice::cuda
