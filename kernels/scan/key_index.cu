// Builds pages of the key index, one block per page and KV head. Keys stay in registers between
// finding their range and quantising them, so that they are read once.
#include <type_traits>

#include "kernels/runtime/code_fit.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/runtime/hadamard.cuh"
#include "kernels/runtime/whole_pages.cuh"
#include "kernels/scan/scan.h"
#include "lib/backend/index_ops.h"
#include "lib/check.h"

namespace sluice::cuda {
namespace {

constexpr int kMaxHeadDim = 256;
// A thread holds two neighbouring channels of 32 tokens: kBoundTokens from kBoundTokens * part on
// and the kBoundTokens half a page later, because those share their bytes at 4 bits.
constexpr int kParts = 4;
constexpr int kThreadTokens = kPageTokens / kParts;
constexpr int kMaxThreads = kParts * kMaxHeadDim / 2;
// Tokens of every part that are rotated at a time, and the floats that a warp rotates at a time.
constexpr int kRotatedTokens = 8;
constexpr int kRotatedFloats = kMaxHeadDim;

template <typename Pages>
struct BuildArgs {
  Pages pages;
  std::int64_t row_bytes;     // bytes from row to row
  const std::int32_t* table;  // [sequences, table_stride]: slots of tiles
  std::int64_t table_stride;
  std::byte* codes;       // [kv_heads, slots, head_dim, kTilePages, code bytes] or null
  std::uint16_t* scales;  // f16 [kv_heads, slots, kTilePages, 2, head_dim]
  std::uint16_t* bounds;  // f16 [kv_heads, slots, kTilePages, kBoundsPerPage, 2, head_dim] or null
  std::int64_t tile_slots;   // per KV head
  std::int64_t bound_slots;  // per KV head
  std::int32_t* bad;         // reported [sequences, kv_heads]
  int head_dim;
  int bits;
  bool fitted;
  // For rotated tiles, see KeyTiles.
  Rotation rotation;
  float kept;
  float margin;
};

__device__ __forceinline__ int token_of(int part, int k) {
  const int half = k / kBoundTokens;
  return half * (kPageTokens / 2) + part * kBoundTokens + k % kBoundTokens;
}

template <int kTokens, typename Pair>
__device__ __forceinline__ PairRange<Pair> range_of(const Pair* keys) {
  PairRange<Pair> range{keys[0], keys[0]};
#pragma unroll
  for (int k = 1; k < kTokens; ++k) range.include({keys[k], keys[k]});
  return range;
}

__device__ __forceinline__ float2 clamp_to_rotated(float2 pair) {
  return make_float2(fminf(fmaxf(pair.x, -kMostRotated), kMostRotated),
                     fminf(fmaxf(pair.y, -kMostRotated), kMostRotated));
}

// Rotates the block's keys by way of `memory`, [kParts * kRotatedTokens, head_dim]. All threads of
// the block call it; those that do not work have no keys.
template <typename Pair>
__device__ __forceinline__ void rotate_keys(const Pair (&keys)[kThreadTokens], bool works, int part,
                                            int pair, int head_dim, const Rotation& rotation,
                                            float* memory, float2 (&rotated)[kThreadTokens]) {
  auto* const own = reinterpret_cast<float2*>(memory + part * kRotatedTokens * head_dim) + pair;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int floats = kParts * kRotatedTokens * head_dim;
  const int step = static_cast<int>(blockDim.x) / kWarp * kRotatedFloats;
#pragma unroll
  for (int first = 0; first < kThreadTokens; first += kRotatedTokens) {
#pragma unroll
    for (int k = 0; k < kRotatedTokens; ++k) {
      if (works) own[k * head_dim / 2] = clamp_to_rotated(floats_of(keys[first + k]));
    }
    __syncthreads();
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x) / kWarp * kRotatedFloats; at < floats; at += step) {
      float x[kRotatedFloats / kWarp];
#pragma unroll
      for (int i = 0; i < kRotatedFloats / kWarp; ++i) {
        const int place = at + i * kWarp + lane;
        x[i] = place < floats ? memory[place] : 0.0f;
      }
      rotate_words(x, rotation);
#pragma unroll
      for (int i = 0; i < kRotatedFloats / kWarp; ++i) {
        const int place = at + i * kWarp + lane;
        if (place < floats) memory[place] = x[i];
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRotatedTokens; ++k) rotated[first + k] = own[k * head_dim / 2];
    __syncthreads();
  }
}

__device__ __forceinline__ void write_pair(std::uint16_t* to, __half low, __half high) {
  *reinterpret_cast<__half2*>(to) = __halves2half2(low, high);
}

// Writes one sub-page's bounds of two channels, rounded outwards.
template <typename Pair>
__device__ __forceinline__ void write_bounds(const PairRange<Pair>& range, int head_dim,
                                             std::uint16_t* to) {
  const float2 low = floats_of(range.low);
  const float2 high = floats_of(range.high);
  write_pair(to, __float2half_rd(clamp_to_half(low.x)), __float2half_rd(clamp_to_half(low.y)));
  write_pair(to + head_dim, __float2half_ru(clamp_to_half(high.x)),
             __float2half_ru(clamp_to_half(high.y)));
}

// Zero and scale of one channel: as f16, which is stored, and its f32 value, which quantises keys.
struct Quantiser {
  __half scale;
  __half zero;
  float base;
  float inverse;
  float largest;

  template <typename Args>
  __device__ Quantiser(float low, float high, const Args& a)
      : largest(static_cast<float>((1 << a.bits) - 1)) {
    const float range = __fsub_rn(high, low);
    // The range of keys that are not clamped may be infinite.
    const float first = a.margin > 0.0f ? __fadd_rn(low, __fmul_rn(range, a.margin)) : low;
    zero = __float2half_rn(clamp_to_half(first));
    scale = __float2half_rn(clamp_to_half(__fdiv_rn(__fmul_rn(range, a.kept), largest)));
    base = __half2float(zero);
    const float step = __half2float(scale);
    inverse = step > 0.0f ? __fdiv_rn(1.0f, step) : 0.0f;
  }

  __device__ std::uint32_t operator()(float key) const {
    return code_of(key, base, inverse, largest);
  }
};

// Place of 16-byte unit `unit` of the codes in shared memory, chosen so that neither its writers
// (two channels apart) nor its readers (in order) conflict in a bank.
__device__ __forceinline__ int place_of(int unit, int bits) {
  return unit ^ ((unit / 8) % (bits == 4 ? 8 : 4));
}

// This thread's codes of one channel: 16 bytes, each with one token of both halves of the page, the
// second half's 4 bits above the first's.
template <typename CodeOf>
__device__ __forceinline__ uint4 pack_codes(int offset, const CodeOf& code) {
  std::uint32_t words[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    std::uint32_t bytes[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      const int k = word * 4 + b;
      // Bits above the lowest byte are garbage that the permutations below drop.
      bytes[b] = code(k) + (code(kBoundTokens + k) << 4);
    }
    words[word] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040),
                              __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410)
                  << offset;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Stages this thread's codes in shared memory, 64 bytes per channel at 4, 2 and 1 bits; at 2 bits
// the two halves of a byte come from different parts, and at 1 bit every part has two bits in each
// of a channel's 16 bytes. At 3 bits the lower two bits are staged as at 2 bits, followed by the
// highest, as at 1 bit.
template <typename Pair>
__device__ __forceinline__ void stage_codes(const Pair* keys, const Quantiser (&quantisers)[2],
                                            int bits, int part, int pair, int head_dim,
                                            uint4* staged) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const auto key = [&](int k) {
      const float2 both = floats_of(keys[k]);
      return c == 0 ? both.x : both.y;
    };
    const int channel = 2 * pair + c;
    const int half = part / 2;
    const int of_low = half * head_dim * 2 + place_of(channel * 2 + part % 2, 2);
    if (bits == 4) {
      staged[place_of(channel * 4 + part, bits)] =
          pack_codes(0, [&](int k) { return quantisers[c](key(k)); });
    } else if (bits == 2) {
      staged[of_low] = pack_codes(2 * half, [&](int k) { return quantisers[c](key(k)); });
    } else if (bits == 1) {
      staged[part * head_dim + channel] =
          pack_codes(part, [&](int k) { return quantisers[c](key(k)) & 1u; });
    } else {
      staged[of_low] = pack_codes(2 * half, [&](int k) { return quantisers[c](key(k)) & 3u; });
      staged[(4 + part) * head_dim + channel] =
          pack_codes(part, [&](int k) { return quantisers[c](key(k)) >> 2 & 1u; });
    }
  }
}

__device__ __forceinline__ uint4 operator|(const uint4& a, const uint4& b) {
  return make_uint4(a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w);
}

// The bits that all parts staged of one channel.
__device__ __forceinline__ uint4 merged_bits(const uint4* of_part, int head_dim) {
  static_assert(kParts == 4);
  return of_part[0] | of_part[head_dim] | of_part[2 * head_dim] | of_part[3 * head_dim];
}

// Writes staged codes to a tile of 3 bits.
__device__ void write_three_bits(const uint4* staged, int head_dim, int odd, uint4* to) {
  constexpr int kUnits = 3;  // per channel
  for (int unit = static_cast<int>(threadIdx.x); unit < head_dim * kUnits;
       unit += static_cast<int>(blockDim.x)) {
    const int channel = unit / kUnits;
    const int part = unit % kUnits;
    const int low = place_of(channel * 2 + part % 2, 2);
    to[unit + (channel * (kTilePages - 1) + odd) * kUnits] =
        part < 2 ? staged[low] | staged[head_dim * 2 + low]
                 : merged_bits(staged + 4 * head_dim + channel, head_dim);
  }
}

// Writes staged codes to a tile, as its odd or its even page.
__device__ void write_codes(const uint4* staged, int head_dim, int bits, int odd, uint4* to) {
  if (bits == 3) return write_three_bits(staged, head_dim, odd, to);
  const int of_channel = bits / 2;  // log2 of the units per channel
  for (int unit = static_cast<int>(threadIdx.x); unit < head_dim << of_channel;
       unit += static_cast<int>(blockDim.x)) {
    const int place = place_of(unit, bits);
    const int channel = unit >> of_channel;
    const int half = (channel ^ odd) % kTilePages;
    to[unit + ((channel * (kTilePages - 1) + half) << of_channel)] =
        bits == 4   ? staged[place]
        : bits == 2 ? staged[place] | staged[head_dim * 2 + place]
                    : merged_bits(staged + channel, head_dim);
  }
}

// Fits scale and zero of a thread's two channels to their codes, by way of `memory`, [kParts,
// head_dim] sums. All threads of the block call it.
__device__ __forceinline__ void fit_scales(Quantiser (&quantisers)[2], const float2* keys,
                                           bool works, int part, int pair, int head_dim,
                                           uint4* memory) {
  auto* const fits = reinterpret_cast<DeviceFit*>(memory);
  // Bits above the lowest byte of a code are garbage.
  constexpr std::uint32_t kByte = 0xffu;
  DeviceFit own[2];
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    own[0].add(keys[k].x, quantisers[0](keys[k].x) & kByte);
    own[1].add(keys[k].y, quantisers[1](keys[k].y) & kByte);
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    if (works) fits[part * head_dim + 2 * pair + c] = own[c];
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    own[c] = fits[2 * pair + c];
    for (int other = 1; other < kParts; ++other) own[c].add(fits[other * head_dim + 2 * pair + c]);
    own[c].solve(quantisers[c].scale, quantisers[c].zero);
  }
  __syncthreads();
}

// Writes the tile of a page. `all`: the range of all keys of the thread's channels.
template <typename Pages, typename Pair>
__device__ __forceinline__ void write_tile(const BuildArgs<Pages>& a, const Pair* keys,
                                           const PairRange<Pair>& all, std::int64_t tile, int odd,
                                           bool works, int part, int pair, uint4* staged) {
  const float2 low = floats_of(all.low);
  const float2 high = floats_of(all.high);
  Quantiser quantisers[2] = {{low.x, high.x, a}, {low.y, high.y, a}};
  if constexpr (std::is_same_v<Pair, float2>) {
    if (a.fitted) fit_scales(quantisers, keys, works, part, pair, a.head_dim, staged);
  }
  if (works && part == 0) {
    std::uint16_t* const scales = a.scales + (tile * kTilePages + odd) * 2 * a.head_dim + 2 * pair;
    write_pair(scales, quantisers[0].scale, quantisers[1].scale);
    write_pair(scales + a.head_dim, quantisers[0].zero, quantisers[1].zero);
  }
  if (works) stage_codes(keys, quantisers, a.bits, part, pair, a.head_dim, staged);
  __syncthreads();
  const std::int64_t tile_bytes =
      static_cast<std::int64_t>(a.head_dim) * kTilePages * kPageTokens * a.bits / 8;
  write_codes(staged, a.head_dim, a.bits, odd,
              reinterpret_cast<uint4*>(a.codes + tile * tile_bytes));
}

// Each block builds one page of one KV head, or has nothing to do.
template <typename T, bool kRotated, typename Pages>
__global__ void __launch_bounds__(kMaxThreads)
    build_kernel(const __grid_constant__ BuildArgs<Pages> a) {
  using Pair = PairOf<T>;
  extern __shared__ uint4 staged[];  // codes or, before them, keys to rotate: shared_bytes()
  using Coded = std::conditional_t<kRotated, float2, Pair>;
  __shared__ PairRange<Coded> ranges[kParts][kMaxHeadDim / 2];
  const int head = static_cast<int>(blockIdx.y);
  WholePage page;
  const bool has_page = a.pages.find(head, a.row_bytes, page);
  std::int64_t slot = 0;
  if (has_page) slot = a.table[page.sequence * a.table_stride + page.number / kTilePages];
  // Blocks with nothing to do wait, too: rule 2 of early_launch.cuh.
  wait_for_kernel_before();
  allow_next_kernel();
  if (!has_page) return;

  const int pairs = a.head_dim / 2;
  const int thread = static_cast<int>(threadIdx.x);
  const bool works = thread < kParts * pairs;
  const int part = works ? thread / pairs : 0;
  const int pair = works ? thread % pairs : 0;

  Pair keys[kThreadTokens];
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) {
    keys[k] = load_pair(T(), page.rows + token_of(part, k) * a.row_bytes, pair);
  }
  const Pair zeros{};
  Pair strange = zeros;
#pragma unroll
  for (int k = 0; k < kThreadTokens; ++k) note_strange(keys[k], zeros, strange);
  const PairRange<Pair> first = range_of<kBoundTokens>(keys);
  const PairRange<Pair> second = range_of<kBoundTokens>(keys + kBoundTokens);
  if constexpr (!kRotated) {
    PairRange<Pair> own = first;
    own.include(second);
    if (works) ranges[part][pair] = own;
  }
  if (__syncthreads_or(is_strange(strange)) != 0) {
    if (thread == 0) a.bad[page.sequence * gridDim.y + head] = 1;
    return;
  }

  const int odd = page.number % kTilePages;
  if (a.bounds != nullptr && works) {
    const std::int64_t at =
        ((head * a.bound_slots + slot) * kTilePages + odd) * kBoundsPerPage + part;
    std::uint16_t* const bounds = a.bounds + at * 2 * a.head_dim + 2 * pair;
    write_bounds(first, a.head_dim, bounds);
    write_bounds(second, a.head_dim, bounds + kParts * 2 * a.head_dim);
  }
  if (a.codes == nullptr) return;
  const auto finish = [&](const Coded* coded) {
    PairRange<Coded> all = ranges[0][pair];
    for (int other = 1; other < kParts; ++other) all.include(ranges[other][pair]);
    write_tile(a, coded, all, head * a.tile_slots + slot, odd, works, part, pair, staged);
  };
  if constexpr (kRotated) {
    float2 rotated[kThreadTokens];
    rotate_keys(keys, works, part, pair, a.head_dim, a.rotation, reinterpret_cast<float*>(staged),
                rotated);
    if (works) ranges[part][pair] = range_of<kThreadTokens>(rotated);
    __syncthreads();
    finish(rotated);
  } else {
    finish(keys);
  }
}

// Shared memory for staged codes: 64 bytes per channel, and at 3 bits 64 more for the highest. Keys
// to rotate take 128 per channel, sums of rotated keys 96.
std::size_t shared_bytes(int head_dim, const KeyTiles& tiles) {
  static_assert(kParts * kRotatedTokens * sizeof(float) == kPageTokens);
  const bool is_double = tiles.bits == 3 || tiles.rotated;
  return static_cast<std::size_t>(head_dim) * kPageTokens / (is_double ? 1 : 2);
}

// Builds `blocks` pages of every KV head.
template <typename Pages>
void build(const char* what, const KvShape& shape, const KeyIndexView& index, const Pages& pages,
           std::int64_t blocks, std::int32_t* bad, const Launch& launch) {
  const int d = shape.head_dim;
  check(d > 0 && d % 2 == 0 && d <= kMaxHeadDim, "build_index: head_dim");
  check(index.tiles.bits >= (index.tiles.rotated ? 1 : 2) && index.tiles.bits <= 4,
        "build_index: bits");
  if (blocks == 0) return;
  BuildArgs<Pages> a{};
  a.pages = pages;
  a.row_bytes = static_cast<std::int64_t>(shape.row_bytes());
  a.table = index.slots;
  a.table_stride = index.table_stride;
  a.codes = index.tiles.codes;
  a.scales = index.tiles.scales;
  a.bounds = index.bounds.bounds;
  a.tile_slots = index.tiles.slots;
  a.bound_slots = index.bounds.slots;
  a.bad = bad;
  a.head_dim = d;
  a.bits = index.tiles.bits;
  a.fitted = KeyTiles::fitted(index.tiles.bits);
  a.rotation = Rotation::of(d);
  a.kept = index.tiles.kept_range();
  a.margin = index.tiles.margin();
  const int threads = (kParts * d / 2 + kWarp - 1) / kWarp * kWarp;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(shape.kv_heads));
  dispatch_key(shape.rows.key(), [&](auto row) {
    const auto start = [&](auto kernel) {
      launch_early(what, kernel, grid, static_cast<unsigned>(threads), shared_bytes(d, index.tiles),
                   launch, a);
    };
    if (index.tiles.rotated) {
      start(build_kernel<decltype(row), true, Pages>);
    } else {
      start(build_kernel<decltype(row), false, Pages>);
    }
  });
}

}  // namespace

void build_index(const BuildIndexParams& p, const Launch& launch) {
  const PageRun pages = {head_rows(p.rows), p.sequence, p.first_page};
  build("build_index", p.shape, p.index, pages, p.pages, p.bad, launch);
}

void build_batch(const BuildBatchParams& p, const Launch& launch) {
  const PagesOfBatch pages = {p.batch.tokens, p.rows};
  build("build_batch", p.shape, p.index, pages, p.batch.count, p.bad, launch);
}

}  // namespace sluice::cuda
