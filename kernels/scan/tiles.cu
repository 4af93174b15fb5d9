// Queries times quantised keys on tensor cores: scale * code by mma, with the channels' scales
// folded into the queries, plus queries times zeros.
//
// Tokens are the rows of A, queries the columns of B, channels the inner dimension; the order of
// tokens and channels is free. A lane reads the same bytes of the four channels that it has in a
// step of 16, so that half2 operands for two tokens need one permutation and a mask each: a code in
// the lowest bits of an f16 is, as a subnormal number, 2^-24 times the code, and tensor cores
// compute with subnormal numbers exactly. Codes in higher bits are larger by powers of two, which
// find_pairs() divides out. The highest of three bits join the lower two once both are bytes of a
// word.
#include <algorithm>
#include <type_traits>

#include "kernels/runtime/error.h"
#include "kernels/scan/tile_results.cuh"
#include "kernels/scan/tiles.h"
#include "lib/backend/index_ops.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

// Loads the data of a head; one warp calls it, and needs a barrier before it reads the tables.
template <int kBits, bool kListed, int kQueries>
__device__ __forceinline__ HeadQueries<kColumnTiles<kQueries>> enter_head(
    const TileScanArgs& a, int head, const WarpMemory& memory) {
  constexpr int kColumns = kColumnTiles<kQueries>;
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
  const int column = first_column<kQueries>();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      of.factors[c][side] = a.queries.factors[head * kMaxQueries + c * 8 + column + side];
    }
  }
  const std::int64_t query = static_cast<std::int64_t>(head) * a.group + a.first_query + column;
  of.logits = a.logits + query * a.stride + lane_id() / 4 * (2 * kLowBits<kBits>);
  return of;
}

// __byte_perm() for selectors that never ask for sign bits.
__device__ __forceinline__ std::uint32_t permute(std::uint32_t a, std::uint32_t b,
                                                 std::uint32_t selector) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

// For each of two channels' words, byte `b` in the lower and byte `next` in the upper byte of 16
// bits.
__device__ __forceinline__ std::uint32_t bytes_of(std::uint32_t first, std::uint32_t second,
                                                  unsigned b, unsigned next) {
  return permute(first, second, b | next << 4 | (b + 4) << 8 | (next + 4) << 12);
}

// One word of codes for each of a lane's four channels. At 3 bits `low` has the lower two bits and
// `high` the highest, see turn().
struct Words {
  uint4 low;
  uint4 high;
};

// Mask of the lower bits of runs 0 and 2 at 3 bits. The bits between and above them are free for
// the highest bits, which belong to neighbours in runs 1 and 3.
constexpr std::uint32_t kEvenRuns = 0x00330033u;

// Codes of two channels from byte `b` of their words. Each byte has one code of every run.
template <int kBits>
class ByteCodes {
 public:
  __device__ ByteCodes(std::uint32_t first, std::uint32_t second, std::uint32_t first_high,
                       std::uint32_t second_high, unsigned b) {
    even_ = odd_ = bytes_of(first, second, b, b);
    if constexpr (kBits == 3) {
      const std::uint32_t high = bytes_of(first_high, second_high, b, (b + 1) % 4);
      even_ = (even_ & kEvenRuns) | (high & ~kEvenRuns);
      odd_ = (odd_ & ~kEvenRuns & 0x00ff00ffu) | (high & (kEvenRuns | ~0x00ff00ffu));
    }
  }
  // The codes of run `run` as two 16-bit numbers, times 2^(kLowBits run).
  __device__ __forceinline__ std::uint32_t run(int run) const {
    constexpr std::uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
    return (run % 2 == 0 ? even_ : odd_) & kMask << (run * kLowBits<kBits>);
  }

 private:
  std::uint32_t even_;
  std::uint32_t odd_;
};

template <int kBits>
__device__ __forceinline__ ByteCodes<kBits> first_two(const Words& words, unsigned b) {
  return {words.low.x, words.low.y, words.high.x, words.high.y, b};
}
template <int kBits>
__device__ __forceinline__ ByteCodes<kBits> last_two(const Words& words, unsigned b) {
  return {words.low.z, words.low.w, words.high.z, words.high.w, b};
}

// Adds the products of the rows of A that come from byte `b` of the words of a lane's four
// channels.
template <int kBits, int kColumns>
__device__ __forceinline__ void multiply_byte(const Words& words, unsigned b, int tile,
                                              const uint2 (&weights)[kColumns],
                                              PageSums<kColumns>& sums) {
  const auto first = first_two<kBits>(words, b);
  const auto second = last_two<kBits>(words, b);
#pragma unroll
  for (int s = 0; s < 4 / kLowBits<kBits>; ++s) {
    const std::uint32_t pairs[4] = {first.run(2 * s), first.run(2 * s + 1), second.run(2 * s),
                                    second.run(2 * s + 1)};
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

// Offsets of a lane's part of a slot, before those of steps and channels are added.
template <int kBits, bool kListed>
struct LaneOffsets {
  using Shape = TileShape<kBits, kListed>;
  // Listed channels lie in an order in which some of the sums are exclusive ors.
  static constexpr int kCodes = kListed && kBits == 2 ? 2 : 1;

  __device__ LaneOffsets() {
    const int row = lane_id() / 4;
    const int quad = lane_id() % 4;
#pragma unroll
    for (int p = 0; p < kTilePages; ++p) {
#pragma unroll
      for (int j = 0; j < kCodes; ++j) {
        const int channel = channel_of_lane(kListed, quad, j);
        const int half = kListed || kBits == 3 ? p : (p ^ channel) % kTilePages;
        const int of_row = kBits == 1 ? row % 4 * 4 : row * (2 * kLowBits<kBits>);
        const int at = channel * Shape::kChannelBytes + half * Shape::kCodeBytes + of_row;
        const int listed = kBits == 3 ? at + quad * static_cast<int>(Shape::kGap) : at ^ quad * 32;
        codes[p][j] = static_cast<std::uint32_t>(kListed ? listed : at);
      }
    }
    scales = Shape::kScaleOffset + static_cast<std::uint32_t>(kListed ? quad : quad / 2) * 16;
  }
  // Offset of the codes of the lane's channel `j` of a step.
  __device__ __forceinline__ std::uint32_t code(int step, int page, int j) const {
    const int apart = channel_of_lane(kListed, 0, j / kCodes * kCodes);
    return codes[page][j % kCodes] +
           static_cast<std::uint32_t>((step * kStepChannels + apart) * Shape::kChannelBytes) +
           static_cast<std::uint32_t>(step) * (kStepChannels / Shape::kGroup * Shape::kGap);
  }
  __device__ __forceinline__ std::uint32_t scale(int step, int page) const {
    return scales + static_cast<std::uint32_t>(step) * kStepChannels * (kListed ? 4 : 2) +
           static_cast<std::uint32_t>(page) * 2 * Shape::kScaleBytes;
  }

  std::uint32_t codes[kTilePages][kCodes];
  std::uint32_t scales;
};

// Loads the scales (or zeros) of this lane's four channels of a step, selected from four pairs.
__device__ __forceinline__ uint2 load_scales(std::uint32_t from, uint2 selectors) {
  uint4 words;
  load_shared(from, words);
  return make_uint2(permute(words.x, words.y, selectors.x), permute(words.z, words.w, selectors.y));
}

// Codes of this lane's four channels of a step and a page; at 3 bits, x has the lower two and y the
// highest.
template <int kBits>
using Codes = std::conditional_t<kBits <= 2, std::uint32_t, uint2>[4];

// Rotates the highest bits of four tokens of every run, a word shared by lanes of two rows four
// apart: bit i of byte k belongs to token 16 i + k, and the upper row has the odd bits. After the
// rotation a lane's own bit of run r (2 r, or 2 r + 1 in the upper row) is bit 2 r + 2, so that the
// bits of run 3 are in the next byte (those of the last byte in the first).
__device__ __forceinline__ std::uint32_t turn(std::uint32_t high) {
  return __funnelshift_l(high, high, 2u - static_cast<unsigned>(lane_id()) / 16);
}

template <int kBits, bool kListed>
__device__ __forceinline__ void load_codes(std::uint32_t slot,
                                           const LaneOffsets<kBits, kListed>& offsets, int step,
                                           int page, Codes<kBits>& codes) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t from = slot + offsets.code(step, page, j);
    if constexpr (kBits == 3) {
      load_shared(from, codes[j].x);
      // Rows are 4 bytes apart, and four rows share 4 bytes of highest bits.
      const auto upper = static_cast<std::uint32_t>(lane_id()) / 16 * 16;
      load_shared(from - upper + TileShape<kBits, kListed>::kHighOffset, codes[j].y);
      codes[j].y = turn(codes[j].y);
    } else {
      load_shared(from, codes[j]);
    }
    // Lanes of two rows four apart share a word: bit i of byte k belongs to token 16 i + k, and the
    // upper row has the odd bits.
    if constexpr (kBits == 1) codes[j] >>= static_cast<unsigned>(lane_id()) / 16;
  }
}

// Returns word `i` of each channel's codes.
template <int kBits>
__device__ __forceinline__ Words words_of(const Codes<kBits>& codes, int i) {
  if constexpr (kBits <= 2) {
    return {make_uint4(codes[0], codes[1], codes[2], codes[3]), {}};
  } else {
    const uint4 first = make_uint4(codes[0].x, codes[1].x, codes[2].x, codes[3].x);
    const uint4 second = make_uint4(codes[0].y, codes[1].y, codes[2].y, codes[3].y);
    if (kBits == 3) return {first, second};
    return {i == 0 ? first : second, {}};
  }
}

// Loads word `word` of this lane's four channels of a step and a page.
__device__ __forceinline__ Words load_words(std::uint32_t slot, const LaneOffsets<4, true>& offsets,
                                            int step, int page, int word) {
  uint4 words;
  const auto load = [&](int j, std::uint32_t& to) {
    load_shared(slot + offsets.code(step, page, j) + static_cast<std::uint32_t>(word) * 4, to);
  };
  load(0, words.x);
  load(1, words.y);
  load(2, words.z);
  load(3, words.w);
  return {words, {}};
}

// Adds weights times a word of four channels' codes of both pages.
template <int kBits>
__device__ __forceinline__ void multiply_word(const Words (&words)[kTilePages], uint2 weights,
                                              WordSums<kLowBits<kBits>>& sums) {
  static_assert(kTilePages == 2);
#pragma unroll
  for (unsigned b = 0; b < 4; ++b) {
    const ByteCodes<kBits> codes[4] = {first_two<kBits>(words[0], b), first_two<kBits>(words[1], b),
                                       last_two<kBits>(words[0], b), last_two<kBits>(words[1], b)};
#pragma unroll
    for (int run = 0; run < 8 / kLowBits<kBits>; ++run) {
      const std::uint32_t pairs[4] = {codes[0].run(run), codes[1].run(run), codes[2].run(run),
                                      codes[3].run(run)};
      mma(__half(), sums[b][run], pairs, weights.x, weights.y);
    }
  }
}

// Adds weights times codes of a page.
template <int kBits, int kColumns>
__device__ __forceinline__ void multiply_codes(const Codes<kBits>& codes,
                                               const uint2 (&weights)[kColumns],
                                               PageSums<kColumns>& sums) {
  constexpr int kTiles = 4 / kLowBits<kBits>;  // per byte
#pragma unroll
  for (int word = 0; word < kLowBits<kBits> / 2; ++word) {
    const Words words = words_of<kBits>(codes, word);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      multiply_byte<kBits>(words, static_cast<unsigned>(b), (word * 4 + b) * kTiles, weights, sums);
    }
  }
}

// Loads the zeros of both pages as A, for step `step` of the chunk in `slot`.
template <int kBits, bool kListed>
__device__ __forceinline__ void load_zeros(std::uint32_t slot,
                                           const LaneOffsets<kBits, kListed>& offsets, int step,
                                           uint2 selectors, std::uint32_t (&zeros)[4]) {
#pragma unroll
  for (int p = 0; p < kTilePages; ++p) {
    const uint2 of_page = load_scales(
        slot + offsets.scale(step, p) + TileShape<kBits, kListed>::kScaleBytes, selectors);
    zeros[p] = of_page.x;
    zeros[2 + p] = of_page.y;
  }
}

__device__ __forceinline__ uint2 weights_of(uint2 query, uint2 scale) {
  return make_uint2(multiply_pairs(query.x, scale.x), multiply_pairs(query.y, scale.y));
}

// Adds queries times zeros of a step and returns the weights of its codes. For scans whose pages
// share the columns.
template <int kBits, bool kListed>
__device__ __forceinline__ uint2 begin_step(std::uint32_t slot,
                                            const LaneOffsets<kBits, kListed>& offsets, int step,
                                            uint2 queries, uint2 selectors, float (&sums)[4]) {
  std::uint32_t zeros[4];
  load_zeros(slot, offsets, step, selectors, zeros);
  mma(__half(), sums, zeros, queries.x, queries.y);
  const int page = lane_id() / 16;  // the page of the lane's column
  return weights_of(queries, load_scales(slot + offsets.scale(step, page), selectors));
}

// Adds one step of 16 channels, step `step` of the chunk in `slot`. `selectors` choose the halves
// of words that the lane takes its scales from.
template <int kBits, bool kListed, int kQueries>
__device__ __forceinline__ void multiply_step(std::uint32_t slot,
                                              const LaneOffsets<kBits, kListed>& offsets, int step,
                                              const uint2 (&queries)[kColumnTiles<kQueries>],
                                              uint2 selectors,
                                              TileSums<kLowBits<kBits>, kQueries>& sums) {
  if constexpr (kQueries == kSharedQueries) {
    const uint2 weights = begin_step(slot, offsets, step, queries[0], selectors, sums.zeros);
    Codes<kBits> codes[kTilePages];
#pragma unroll
    for (int p = 0; p < kTilePages; ++p) load_codes<kBits>(slot, offsets, step, p, codes[p]);
#pragma unroll
    for (int word = 0; word < kLowBits<kBits> / 2; ++word) {
      const Words words[kTilePages] = {words_of<kBits>(codes[0], word),
                                       words_of<kBits>(codes[1], word)};
      multiply_word<kBits>(words, weights, sums.codes[word]);
    }
  } else {
    constexpr int kColumns = kColumnTiles<kQueries>;
    std::uint32_t zeros[4];
    load_zeros(slot, offsets, step, selectors, zeros);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      mma(__half(), sums.pages[0].zeros[c], zeros, queries[c].x, queries[c].y);
    }
#pragma unroll
    for (int p = 0; p < kTilePages; ++p) {
      const uint2 scale = load_scales(slot + offsets.scale(step, p), selectors);
      uint2 weights[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) weights[c] = weights_of(queries[c], scale);
      Codes<kBits> codes;
      load_codes<kBits>(slot, offsets, step, p, codes);
      multiply_codes<kBits>(codes, weights, sums.pages[p]);
    }
  }
}

// One step's half of a pair of steps' data.
__device__ __forceinline__ uint2 of_step(const uint4& both, int step) {
  return step == 0 ? make_uint2(both.x, both.y) : make_uint2(both.z, both.w);
}

// Query data for a pair of steps.
template <int kColumns>
struct PairQueries {
  uint4 fragments[kColumns];
  uint4 selectors;  // choose the halves of words that the lane takes its scales from
};

template <bool kListed, int kColumns>
__device__ __forceinline__ PairQueries<kColumns> load_pair(const HeadQueries<kColumns>& of_head,
                                                           const WarpMemory& memory, int pair) {
  PairQueries<kColumns> of;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const int place = (pair * kColumns + c) * kWarp;
    of.fragments[c] =
        kListed ? memory.fragments[place + lane_id()] : __ldg(of_head.fragments + place);
  }
  const std::uint32_t half = lane_id() % 2 == 0 ? 0x5410u : 0x7632u;
  of.selectors =
      kListed ? memory.selectors[pair * 4 + lane_id() % 4] : make_uint4(half, half, half, half);
  return of;
}

// Adds a pair of steps; only the first `steps` exist.
template <int kBits, bool kListed, int kQueries>
__device__ __forceinline__ void multiply_pair(std::uint32_t slot,
                                              const LaneOffsets<kBits, kListed>& offsets, int steps,
                                              const PairQueries<kColumnTiles<kQueries>>& queries,
                                              TileSums<kLowBits<kBits>, kQueries>& sums) {
  constexpr int kColumns = kColumnTiles<kQueries>;
#pragma unroll
  for (int s = 0; s < kPairSteps; ++s) {
    if (s >= steps) break;
    uint2 fragments[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) fragments[c] = of_step(queries.fragments[c], s);
    multiply_step<kBits, kListed, kQueries>(slot, offsets, s, fragments,
                                            of_step(queries.selectors, s), sums);
  }
}

// Stores the logits of a tile, or only those of its candidates.
template <int kBits, TileScan kScan, int kQueries>
__device__ __forceinline__ void store_tile(TileSums<kBits, kQueries>& sums, const TileScanArgs& a,
                                           const HeadQueries<kColumnTiles<kQueries>>& queries,
                                           TilePlace at, const TileCandidates& candidates,
                                           __half* staged) {
  if constexpr (kQueries != kSharedQueries) {
#pragma unroll
    for (int c = 0; c < kColumnTiles<kQueries>; ++c) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        sums.pages[1].zeros[c][side] = sums.pages[0].zeros[c][2 + side];
      }
    }
  }
  if (has_candidates<kScan>(a)) {
    store_candidates<kBits, kQueries>(sums, a, queries, at, candidates, staged);
  } else if (a.aligned) {
    store_logits<kBits, true, kQueries>(sums, a, queries, at);
  } else {
    store_logits<kBits, false, kQueries>(sums, a, queries, at);
  }
}

// Scans and stores the tiles of one warp.
template <int kBits, TileScan kScan, int kQueries>
__device__ __forceinline__ void scan_tiles(const TileScanArgs& a, const ScanTokens& tokens,
                                           const WarpMemory& memory) {
  constexpr bool kListed = kScan == TileScan::listed;
  constexpr int kColumns = kColumnTiles<kQueries>;
  using Shape = TileShape<kBits, kListed>;
  using Copier =
      std::conditional_t<kListed, ListedCopier<kBits, kScan>, OrderedCopier<kBits, kScan>>;
  Copier copier(a, tokens, memory);
  // Tiles that do not depend on candidates or listed channels are copied while the kernel before
  // still prepares the queries.
  constexpr bool kEarly = kScan == TileScan::all;
  static_assert(Shape::kAhead < kLeastDynamicTiles * Shape::kStaticEighths / 8, "see begin()");
  if (!kEarly) {
    wait_for_kernel_before();
    copier.begin();
  }
#pragma unroll 1
  for (int i = 0; i < Shape::kAhead; ++i) copier.copy_next();
  if (kEarly) {
    wait_for_kernel_before();
    copier.begin();
  }

  const LaneOffsets<kBits, kListed> offsets;
  const std::uint32_t first_slot = shared_address(memory.ring);
  std::uint32_t slot = first_slot;
  unsigned round = 0;  // lowest bit of the number of passes through the ring
  TilePlace at;
  HeadQueries<kColumns> queries;
  while (copier.oldest().last_page >= 0) {
    if (copier.oldest().head != at.head) {
      queries = enter_head<kBits, kListed, kQueries>(a, copier.oldest().head, memory);
    }
    at = copier.oldest();
    TileCandidates candidates{};
    if (kScan == TileScan::candidates) candidates = candidates_of(a, at);
    TileSums<kLowBits<kBits>, kQueries> sums{};
#pragma unroll 1
    for (int pair = 0; pair < a.pairs; ++pair) {
      PairQueries<kColumns> of_pair;  // loaded early if it comes from global memory
      if (!kListed) of_pair = load_pair<kListed>(queries, memory, pair);
      copier.wait(slot, round);
      __syncwarp();
      copier.copy_next();
      if (kListed) of_pair = load_pair<kListed>(queries, memory, pair);
      multiply_pair<kBits, kListed, kQueries>(slot, offsets, a.steps - pair * kPairSteps, of_pair,
                                              sums);
      slot += Shape::kSlotBytes;
      if (slot == first_slot + Shape::kRingBytes) {
        slot = first_slot;
        round ^= 1;
      }
    }
    if (kListed && has_candidates<kScan>(a)) {
      candidates = candidates_of(a, at);  // late, to save registers in the common case
    }
    store_tile<kLowBits<kBits>, kScan, kQueries>(sums, a, queries, at, candidates, memory.staged);
  }
}

// Scans of few listed channels for few queries. One chunk has all channels of a tile, so that the
// sums of half its tokens are complete before those of the other half begin, and the query data
// that other listed scans keep in shared memory fits in registers.

using FewShape = TileShape<4, true>;

// A lane's data of the KV head whose tiles it scans.
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

// Computes the logits of this lane's queries and page for the tile in `slot`.
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

// Shared memory per warp: its ring, and the places and scales of its head that it copies.
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

constexpr int kScanThreads = kScanWarps * kWarp;
constexpr int kTableThreads = 256;
constexpr int kTableBlocks = 16;  // per multiprocessor

// One block per head.
__global__ void __launch_bounds__(kQueryThreads)
    prepare_kernel(const __grid_constant__ PrepareArgs a) {
  __shared__ Queries queries;
  const auto token = static_cast<int>(blockIdx.y);
  const auto kv_head = static_cast<int>(blockIdx.x);
  // Waits before it lets the scan of tiles begin, because that copies tiles before it waits.
  wait_for_kernel_before();
  allow_next_kernel();
  load_queries(a.queries, a.queries.of(token, kv_head), queries);
  prepare_tiles(queries, a, token * static_cast<int>(gridDim.x) + kv_head, token);
}

// Records the first candidate of every tile and counts the pages of tiles with candidates.
__global__ void __launch_bounds__(kTableThreads)
    table_kernel(const std::int32_t* positions, std::int64_t position_capacity,
                 const __grid_constant__ TileQueries to, std::int64_t most_tiles) {
  const auto head = static_cast<std::int64_t>(blockIdx.z) * gridDim.y + blockIdx.y;
  wait_for_kernel_before();
  allow_next_kernel();
  const std::int32_t count = to.counts[head];
  const std::int32_t* const list = positions + head * position_capacity;
  const auto step = static_cast<std::int32_t>(gridDim.x * kTableThreads);
  std::int32_t tiles = 0;
  for (auto i = static_cast<std::int32_t>(blockIdx.x * kTableThreads + threadIdx.x); i < count;
       i += step) {
    const std::int32_t tile = list[i] / kTileTokens;
    if (i > 0 && list[i - 1] / kTileTokens == tile) continue;
    to.first[head * most_tiles + tile] = i;
    ++tiles;
  }
  if (to.read == nullptr) return;
  tiles = __reduce_add_sync(~0u, tiles);
  if (lane_id() == 0 && tiles > 0) atomicAdd(&to.read[head], tiles * kTilePages);
}

template <int kBits, TileScan kScan, int kQueries>
__global__ void __launch_bounds__(kScanThreads, kQueries <= 8 ? kScanBlocks : 2)
    scan_kernel(const __grid_constant__ TileScanArgs a) {
  constexpr bool kListed = kScan == TileScan::listed;
  constexpr int kColumns = kColumnTiles<kQueries>;
  using Shape = TileShape<kBits, kListed>;
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ ScanTokens tokens;
  __shared__ std::uint64_t full[kScanWarps][Shape::kStages];
  find_tokens(a, Shape::kStaticEighths, tokens);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::uint32_t tables = table_bytes<kListed, kColumns>(a.pairs);
  std::byte* const mine =
      shared + kScanWarps * Shape::kRingBytes + static_cast<unsigned>(warp) * tables;
  WarpMemory memory{};
  memory.ring = shared + static_cast<unsigned>(warp) * Shape::kRingBytes;
  memory.fragments = reinterpret_cast<uint4*>(mine);
  memory.places = memory.fragments + a.pairs * kColumns * kWarp;
  memory.selectors = memory.places + a.pairs * kWarp;
  memory.scales = reinterpret_cast<std::uint32_t*>(memory.selectors + a.pairs * 4);
  memory.staged = reinterpret_cast<__half*>(shared + kScanWarps * (Shape::kRingBytes + tables)) +
                  warp * a.query_count * kTileTokens;
  memory.full = full[warp];
  scan_tiles<kBits, kScan, kQueries>(a, tokens, memory);
}

template <int kSteps>
__global__ void __launch_bounds__(kScanThreads, kScanBlocks)
    scan_few_kernel(const __grid_constant__ TileScanArgs a) {
  extern __shared__ __align__(128) std::byte shared[];
  __shared__ ScanTokens tokens;
  find_tokens(a, FewShape::kStaticEighths, tokens);
  scan_few<kSteps>(a, tokens, few_memory(shared + threadIdx.x / kWarp * kFewBytes));
}

// Launches a scan with `shared` bytes of shared memory per block.
void launch_kernel(void (*kernel)(TileScanArgs), std::size_t shared, const TileScanArgs& a,
                   const Launch& launch) {
  // The occupancy query below needs it, too.
  allow_shared_memory("tile scan", kernel, shared, *launch.device);
  int resident = 0;
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kScanThreads, shared),
          "tile scan");
  check(resident > 0, "tile scan: no block fits");
  const std::int64_t most = a.most_tiles * a.kv_heads * a.token_count;
  check(most <= kMostTiles, "tile scan: tiles");
  const std::int64_t useful = (most + kScanWarps - 1) / kScanWarps;
  const std::int64_t blocks =
      std::min<std::int64_t>(std::int64_t{launch.device->multiprocessors} * resident, useful);
  launch_early("tile scan", kernel, dim3(static_cast<unsigned>(blocks)), kScanThreads, shared,
               launch, a);
}

template <int kBits, TileScan kScan, int kQueries>
void launch_scan(const TileScanArgs& a, const Launch& launch) {
  constexpr bool kListed = kScan == TileScan::listed;
  std::size_t shared = kScanWarps * (TileShape<kBits, kListed>::kRingBytes +
                                     table_bytes<kListed, kColumnTiles<kQueries>>(a.pairs));
  if (a.has_candidates) {
    shared += kScanWarps * kTileTokens * sizeof(__half) * static_cast<unsigned>(a.query_count);
  }
  launch_kernel(scan_kernel<kBits, kScan, kQueries>, shared, a, launch);
}

// Returns true if scan_few() supports the call.
bool is_few(const TileScanArgs& a, int bits) {
  return bits == 4 && a.pairs == 1 && a.query_count <= kSharedQueries && !a.has_candidates &&
         a.aligned;
}

void launch_few(const TileScanArgs& a, const Launch& launch) {
  const auto kernel = a.steps == 1 ? scan_few_kernel<1> : scan_few_kernel<2>;
  launch_kernel(kernel, kScanWarps * kFewBytes, a, launch);
}

// Returns true if a kernel for 8 queries is compiled. Kernels take long to compile, so at 3 bits
// and 1 only the most frequent scan, all channels of every tile, has one; other scans use the
// kernel for kMaxQueries with half of its columns idle.
constexpr bool has_eight(int bits, TileScan scan) { return bits % 2 == 0 || scan == TileScan::all; }

// Queries that the kernel for `queries` queries is compiled for.
constexpr int width_of(int bits, TileScan scan, int queries) {
  if (queries <= kSharedQueries) return kSharedQueries;
  return queries <= 8 && has_eight(bits, scan) ? 8 : kMaxQueries;
}

template <int kBits, TileScan kScan>
void dispatch_queries(const TileScanArgs& a, const Launch& launch) {
  const int width = width_of(kBits, kScan, a.query_count);
  if (width == kSharedQueries) return launch_scan<kBits, kScan, kSharedQueries>(a, launch);
  if constexpr (has_eight(kBits, kScan)) {
    if (width == 8) return launch_scan<kBits, kScan, 8>(a, launch);
  }
  launch_scan<kBits, kScan, kMaxQueries>(a, launch);
}

template <int kBits>
void dispatch_scan(const TileScanArgs& a, TileScan scan, const Launch& launch) {
  if (scan == TileScan::listed) {
    check(kBits != 1, "tile scan: channels of 1 bit");  // not compiled
    if constexpr (kBits != 1) dispatch_queries<kBits, TileScan::listed>(a, launch);
  } else if (scan == TileScan::candidates) {
    dispatch_queries<kBits, TileScan::candidates>(a, launch);
  } else {
    dispatch_queries<kBits, TileScan::all>(a, launch);
  }
}

int steps_of(const EstimateParams& p) {
  return (channels_of(p) + kStepChannels - 1) / kStepChannels;
}

// Returns true unless the channels are all of a head_dim of whole steps, which lie side by side.
bool is_listed(const EstimateParams& p) {
  return channels_of(p) != p.shape.head_dim || p.shape.head_dim % kStepChannels != 0;
}

TileScan kind_of(const EstimateParams& p) {
  if (is_listed(p)) return TileScan::listed;
  return p.candidates != nullptr ? TileScan::candidates : TileScan::all;
}

// Allocates arrays from the scratch memory; without memory it only counts the bytes.
class Pieces {
 public:
  explicit Pieces(std::byte* base) : base_(base) {}

  template <typename T>
  T* take(std::int64_t count) {
    std::byte* const piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return reinterpret_cast<T*>(piece);
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

TileQueries take_queries(const EstimateParams& p, Pieces& pieces) {
  const std::int64_t heads = p.batch.count * p.shape.kv_heads;
  TileQueries to{};
  const std::int64_t pairs = (steps_of(p) + 1) / 2;
  to.fragments = pieces.take<uint4>(heads * pairs * (kMaxQueries / 8) * kWarp);
  to.factors = pieces.take<float>(heads * kMaxQueries);
  to.places = pieces.take<uint4>(heads * pairs * kWarp);
  to.scales = pieces.take<std::uint32_t>(heads * pairs * kWarp);
  to.selectors = pieces.take<uint4>(heads * pairs * 4);
  to.counters = pieces.take<std::uint32_t>(kRunCounters);
  if (p.candidates != nullptr) {
    to.counts = pieces.take<std::int32_t>(heads);
    to.first = pieces.take<std::int32_t>(heads * most_tiles(p));
    to.read = p.pages_read;
  }
  return to;
}

void make_table(const EstimateParams& p, const TileQueries& to, const Launch& launch) {
  const std::int64_t heads = p.batch.count * p.shape.kv_heads;
  const std::int64_t useful = (p.candidates->capacity + kTableThreads - 1) / kTableThreads;
  const std::int64_t fit = kTableBlocks * launch.device->multiprocessors / heads;
  const std::int64_t blocks = std::clamp<std::int64_t>(fit, 1, std::max<std::int64_t>(useful, 1));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(p.shape.kv_heads),
                  static_cast<unsigned>(p.batch.count));
  launch_early("candidate table", table_kernel, grid, kTableThreads, 0, launch,
               p.candidates->positions, p.candidates->capacity, to, most_tiles(p));
}

TileScanArgs scan_args(const ScanPass& pass, const TileQueries& queries) {
  const EstimateParams& p = *pass.estimate;
  TileScanArgs a{};
  a.tokens = p.batch.tokens;
  a.token_count = static_cast<int>(p.batch.count);
  a.table = p.index.slots;
  a.table_stride = p.index.table_stride;
  a.kv_heads = p.shape.kv_heads;
  a.queries = queries;
  a.codes = p.index.tiles.codes;
  a.scales = p.index.tiles.scales;
  if (p.candidates != nullptr) {
    a.has_candidates = true;
    a.positions = p.candidates->positions;
    a.position_capacity = p.candidates->capacity;
  }
  a.logits = reinterpret_cast<__half*>(p.logits.data);
  a.digest = PageDigest::of(p.logits.digest);
  a.slots = p.index.tiles.slots;
  a.stride = p.logits.stride;
  a.most_tiles = most_tiles(p);
  a.head_dim = p.shape.head_dim;
  a.steps = steps_of(p);
  a.pairs = (a.steps + 1) / 2;
  a.group = p.shape.group();
  a.first_query = pass.first_query;
  a.query_count = pass.queries;
  a.aligned = p.logits.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(p.logits.data) % 16 == 0;
  return a;
}

}  // namespace

std::int64_t most_tiles(const EstimateParams& p) {
  return (most_pages(p.batch) + kTilePages - 1) / kTilePages;
}

std::size_t tile_scan_scratch_bytes(const EstimateParams& p) {
  Pieces pieces(nullptr);
  take_queries(p, pieces);
  return pieces.used();
}

PrepareArgs prepare_args(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  PrepareArgs a{};
  a.queries = query_args(pass);
  check(p.method != Selector::sparq || !p.index.tiles.rotated, "sparq reads unrotated tiles");
  if (p.index.tiles.rotated) a.queries.rotation = Rotation::of(p.shape.head_dim);
  check(tile_scan_scratch_bytes(p) <= launch.scratch_bytes, "tile scan: scratch");
  Pieces pieces(launch.scratch);
  a.to = take_queries(p, pieces);
  a.tokens = p.batch.tokens;
  a.candidates = p.candidates != nullptr ? p.candidates->heads : nullptr;
  a.most_tiles = most_tiles(p);
  a.steps = steps_of(p);
  const int width = width_of(p.index.tiles.bits, kind_of(p), pass.queries);
  a.column_tiles = width <= 8 ? 1 : 2;
  a.columns = std::min(width, 8);
  a.units = ListedUnits::of_bits(p.index.tiles.bits);
  a.listed = is_listed(p);
  return a;
}

void prepare_scan(const ScanPass& pass, const PrepareArgs& args, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(pass.estimate->shape.kv_heads),
                  static_cast<unsigned>(pass.estimate->batch.count));
  launch_early("prepare tile scan", prepare_kernel, grid, kQueryThreads, 0, launch, args);
}

void scan_tiles(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  Pieces pieces(launch.scratch);
  const TileQueries queries = take_queries(p, pieces);
  if (p.candidates != nullptr) make_table(p, queries, launch);
  const TileScanArgs a = scan_args(pass, queries);
  const TileScan kind = kind_of(p);
  if (kind == TileScan::listed && is_few(a, p.index.tiles.bits)) {
    launch_few(a, launch);
  } else if (p.index.tiles.bits == 4) {
    dispatch_scan<4>(a, kind, launch);
  } else if (p.index.tiles.bits == 3) {
    dispatch_scan<3>(a, kind, launch);
  } else if (p.index.tiles.bits == 2) {
    dispatch_scan<2>(a, kind, launch);
  } else {
    dispatch_scan<1>(a, kind, launch);
  }
}

}  // namespace sluice::cuda
