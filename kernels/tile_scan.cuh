// Queries times quantised keys on tensor cores.
//
// Tokens are the rows of A, channels its inner dimension; both orders are free. A lane takes the
// same bytes of the four channels that it has in a step of 16, so that half2 operands need one
// permutation for two tokens and a mask each: a code in the lowest bits of an f16 is, as a
// subnormal number, 2^-24 times the code, and tensor cores compute with subnormal numbers exactly.
// Codes in higher bits are larger by powers of two, which the epilogue takes back.
#pragma once

#include <type_traits>

#include "kernels/tile_scan_results.cuh"

namespace sluice::cuda {

// Comes to a head; by a warp, with a barrier before the tables may be read.
template <int kBits, bool kListed, int kColumns>
__device__ __forceinline__ HeadQueries<kColumns> enter_head(const TileScanArgs& a, int head,
                                                            const WarpMemory& memory) {
  HeadQueries<kColumns> of;
  const std::int64_t first = static_cast<std::int64_t>(head) * a.pairs;
  of.fragments = a.queries.fragments + first * (kColumns * kWarp) + lane_id();
  if constexpr (kListed) {
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < a.pairs * kColumns; ++i) {
      memory.fragments[i * kWarp + lane_id()] = __ldg(of.fragments + i * kWarp);
    }
    const uint4* const selectors = a.queries.selectors + first * 4;
#pragma unroll 1
    for (int i = lane_id(); i < a.pairs * 4; i += kWarp) memory.selectors[i] = __ldg(selectors + i);
  }
  const int column = lane_id() % 4 * 2;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      of.factors[c][side] = a.queries.factors[head * kMaxQueries + c * 8 + column + side];
    }
  }
  const std::int64_t query = static_cast<std::int64_t>(head) * a.group + a.first_query + column;
  of.logits = a.logits + query * a.stride + lane_id() / 4 * (2 * kBits);
  return of;
}

// A permutation whose selector is known not to ask for signs.
__device__ __forceinline__ std::uint32_t permute(std::uint32_t a, std::uint32_t b,
                                                 std::uint32_t selector) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

// Byte `b` of two channels' words, each twice.
__device__ __forceinline__ std::uint32_t bytes_of(std::uint32_t first, std::uint32_t second,
                                                  unsigned b) {
  return permute(first, second, b | b << 4 | (b + 4) << 8 | (b + 4) << 12);
}

// Rows of A out of byte `b` of the words of a lane's four channels.
template <int kBits, int kColumns>
__device__ __forceinline__ void multiply_byte(const std::uint32_t (&words)[4], unsigned b, int tile,
                                              const uint2 (&weights)[kColumns],
                                              PageSums<kColumns>& sums) {
  constexpr std::uint32_t kMask = kBits == 4 ? 0x000f000fu : 0x00030003u;
  const std::uint32_t first = bytes_of(words[0], words[1], b);
  const std::uint32_t second = bytes_of(words[2], words[3], b);
#pragma unroll
  for (int s = 0; s < (kBits == 4 ? 1 : 2); ++s) {
    const std::uint32_t upper = kMask << (2 * s * kBits);
    const std::uint32_t lower = upper << kBits;
    const std::uint32_t pairs[4] = {first & upper, first & lower, second & upper, second & lower};
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      mma(__half(), sums.codes[tile + s][c], pairs, weights[c].x, weights[c].y);
    }
  }
}

__device__ __forceinline__ std::uint32_t multiply_pairs(std::uint32_t a, std::uint32_t b) {
  const __half2 product =
      __hmul2(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&product);
}

__device__ __forceinline__ void load_shared(std::uint32_t from, std::uint32_t& to) {
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(to) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t from, uint2& to) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];\n"
               : "=r"(to.x), "=r"(to.y)
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_shared(std::uint32_t from, uint4& to) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
               : "r"(from)
               : "memory");
}

// Where a lane finds its part of a slot, as offsets that steps and channels are added to.
template <int kBits, bool kListed>
struct LaneOffsets {
  using Shape = TileShape<kBits, kListed>;
  // Listed channels lie in an order that makes some of the sums exclusive ors.
  static constexpr int kCodes = kListed ? 8 / kBits : 1;

  __device__ LaneOffsets() {
    const int row = lane_id() / 4;
    const int quad = lane_id() % 4;
#pragma unroll
    for (int j = 0; j < kCodes; ++j) {
      const int at = channel_of_lane(kListed, quad, j) * Shape::kCodeBytes + row * (2 * kBits);
      codes[j] = static_cast<std::uint32_t>(kListed ? at ^ quad * 32 : at);
    }
    scales = Shape::kScaleOffset + static_cast<std::uint32_t>(kListed ? quad : quad / 2) * 16;
  }
  // The lane's channel `j` of a step.
  __device__ __forceinline__ std::uint32_t code(int step, int j) const {
    const int apart = channel_of_lane(kListed, 0, j / kCodes * kCodes);
    return codes[j % kCodes] +
           static_cast<std::uint32_t>((step * kStepChannels + apart) * Shape::kCodeBytes);
  }
  __device__ __forceinline__ std::uint32_t scale(int step) const {
    return scales + static_cast<std::uint32_t>(step) * kStepChannels * (kListed ? 4 : 2);
  }

  std::uint32_t codes[kCodes];
  std::uint32_t scales;
};

// Scales (or zeros) of this lane's four channels of a step, out of four pairs.
__device__ __forceinline__ uint2 load_scales(std::uint32_t from, uint2 selectors) {
  uint4 words;
  load_shared(from, words);
  return make_uint2(permute(words.x, words.y, selectors.x), permute(words.z, words.w, selectors.y));
}

// One step of 16 channels, step `step` of the chunk in `slot`. Selectors tell which halves of words
// the lane takes its scales from.
template <int kBits, bool kListed, int kColumns>
__device__ __forceinline__ void multiply_step(std::uint32_t slot,
                                              const LaneOffsets<kBits, kListed>& offsets, int step,
                                              const uint2 (&queries)[kColumns], uint2 selectors,
                                              PageSums<kColumns>& sums) {
  using Shape = TileShape<kBits, kListed>;
  const uint2 scale = load_scales(slot + offsets.scale(step), selectors);
  const uint2 zero = load_scales(slot + offsets.scale(step) + Shape::kScaleBytes, selectors);
  std::conditional_t<kBits == 4, uint2, std::uint32_t> codes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) load_shared(slot + offsets.code(step, j), codes[j]);
  const std::uint32_t zeros[4] = {zero.x, zero.x, zero.y, zero.y};
  uint2 weights[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    mma(__half(), sums.zeros[c], zeros, queries[c].x, queries[c].y);
    weights[c] =
        make_uint2(multiply_pairs(queries[c].x, scale.x), multiply_pairs(queries[c].y, scale.y));
  }
  if constexpr (kBits == 4) {
    const std::uint32_t near[4] = {codes[0].x, codes[1].x, codes[2].x, codes[3].x};
    const std::uint32_t far[4] = {codes[0].y, codes[1].y, codes[2].y, codes[3].y};
#pragma unroll
    for (unsigned b = 0; b < 4; ++b) {
      multiply_byte<kBits>(near, b, static_cast<int>(b), weights, sums);
    }
#pragma unroll
    for (unsigned b = 0; b < 4; ++b) {
      multiply_byte<kBits>(far, b, static_cast<int>(b) + 4, weights, sums);
    }
  } else {
#pragma unroll
    for (unsigned b = 0; b < 4; ++b) {
      multiply_byte<kBits>(codes, b, static_cast<int>(b) * 2, weights, sums);
    }
  }
}

// Two steps, those of `pair` of the page and `first` of the chunk on, of which `steps` are there.
template <int kBits, bool kListed, int kColumns>
__device__ __forceinline__ void multiply_pair(std::uint32_t slot,
                                              const LaneOffsets<kBits, kListed>& offsets, int first,
                                              int steps, int pair,
                                              const HeadQueries<kColumns>& of_head,
                                              const WarpMemory& memory, PageSums<kColumns>& sums) {
  if (steps <= 0) return;
  uint4 queries[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int place = (pair * kColumns + c) * kWarp;
    queries[c] = kListed ? memory.fragments[place + lane_id()] : __ldg(of_head.fragments + place);
  }
  // Which halves of words the lane takes its scales from.
  const std::uint32_t half = lane_id() % 2 == 0 ? 0x5410u : 0x7632u;
  const uint4 selectors =
      kListed ? memory.selectors[pair * 4 + lane_id() % 4] : make_uint4(half, half, half, half);
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    if (s >= steps) break;
    uint2 of_step[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      of_step[c] =
          s == 0 ? make_uint2(queries[c].x, queries[c].y) : make_uint2(queries[c].z, queries[c].w);
    }
    const uint2 halves =
        s == 0 ? make_uint2(selectors.x, selectors.y) : make_uint2(selectors.z, selectors.w);
    multiply_step(slot, offsets, first + s, of_step, halves, sums);
  }
}

// Sums and stores the pages of one warp.
template <int kBits, bool kListed, int kColumns>
__device__ __forceinline__ void scan_pages(const TileScanArgs& a, const WarpMemory& memory) {
  using Shape = TileShape<kBits, kListed>;
  constexpr int kPairs = Shape::kSteps / 2;
  using Copier = std::conditional_t<kListed, ListedCopier<kBits>, OrderedCopier<kBits>>;
  Copier copier(a, memory);
  // Pages that are scanned in any case are copied while the queries are made ready.
  const bool early = !kListed && !a.has_candidates;
  if (!early) {
    wait_for_kernel_before();
    copier.begin();
  }
#pragma unroll 1
  for (int i = 0; i < Shape::kStages - 1; ++i) copier.copy_next();
  if (early) {
    wait_for_kernel_before();
    copier.begin();
  }

  const LaneOffsets<kBits, kListed> offsets;
  const std::uint32_t first_slot = shared_address(memory.ring);
  std::uint32_t slot = first_slot;
  unsigned round = 0;  // the lowest bit of how often the ring was gone through
  PageHead at;
  HeadQueries<kColumns> queries;
  while (copier.oldest() >= 0) {
    if (at.find(copier.oldest(), a.pages)) {
      queries = enter_head<kBits, kListed, kColumns>(a, at.head, memory);
    }
    PageCandidates candidates{};
    if (!kListed && a.has_candidates) candidates = candidates_of(a, at);
    PageSums<kColumns> sums{};
    int first = 0;  // pair of steps of this chunk
    do {
      copier.wait(slot, round);
      __syncwarp();
      copier.copy_next();
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        multiply_pair(slot, offsets, pair * 2, a.steps - (first + pair) * 2, first + pair, queries,
                      memory, sums);
      }
      slot += Shape::kSlotBytes;
      if (slot == first_slot + Shape::kRingBytes) {
        slot = first_slot;
        round ^= 1;
      }
      first += kPairs;
    } while (first < a.pairs);
    if (a.has_candidates) {
      if (kListed) candidates = candidates_of(a, at);  // rare, and registers are not
      store_candidates<kBits>(sums, a, queries, at, candidates, memory.staged);
    } else if (a.aligned) {
      store_page<kBits, true>(sums, a, queries, at);
    } else {
      store_page<kBits, false>(sums, a, queries, at);
    }
  }
}

}  // namespace sluice::cuda
