// Coded weights as bytes, the operands of mma.m16n8k32, for one or two tokens: there a weight must
// cost next to nothing to come at the memory's rate. An input becomes three signed bytes, its
// digits in base 256 relative to the largest input of its tile column (kTileInputs of them), so
// that codes are multiplied by integers as they are. Digits hold 22 bits below that largest input,
// more than the f16 or bf16 that they come from; sums over a group are exact. They are added up in
// f32, times the group's scale and the digit's. An input that is infinite makes NaN of its token's
// products, as NaN does.
//
//   int8   codes are bytes
//   int4   two byte permutations look a code up, one among the magnitudes of the eight negative
//          levels and one among the positive ones. Each gives zero for the other's codes, because a
//          permutation repeats the sign of the byte that it selects where the selector's highest
//          bit is set, and all these bytes are positive. The product with the first is subtracted
//          from that with the second.
//
// Each digit of a token is a column of B, and one mma multiplies eight columns.
#pragma once

#include "kernels/dense/coded_product.h"
#include "kernels/runtime/device_math.cuh"
#include "lib/weight_code.h"

namespace sluice::cuda {

// 3 * 2^22, whose lowest bit is 1 as an f32: the sum of these bits and an integer of less than 2^22
// is an f32 that exceeds the integer by that number.
inline constexpr std::int32_t kIntegerBits = 0x4b400000;
inline constexpr float kIntegerFloat = 12582912.0f;

// Bytes that four selectors of 4 bits choose among `low` and `high`, or, of a selector whose
// highest bit is set, the sign of the chosen byte (PTX ISA 8, prmt).
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t low, std::uint32_t high,
                                                       std::uint32_t selectors) {
  std::uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

// d = a b + kIntegerBits with d [16, 8], a [16, 32] and b [32, 8] of signed bytes: mma.m16n8k32
// (PTX ISA 8, "Matrix Fragments for mma.m16n8k32"). Lane l holds
//   d             as mma() of m16n8k16
//   a[0] to a[3]  rows l/4, l/4 + 8, l/4, l/4 + 8; inner elements 4 (l%4) to 4 (l%4) + 3, from a[2]
//                 on 16 further
//   b             column l/4; inner elements as in a[0] and a[2]
__device__ __forceinline__ void mma_bytes(std::int32_t (&d)[4], const std::uint32_t (&a)[4],
                                          uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};\n"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(kIntegerBits));
}

// Magnitudes of four levels of int4, from kFirst on.
template <std::size_t kFirst>
inline constexpr std::uint32_t kLevelBytes = [] {
  std::uint32_t bytes = 0;
  for (std::size_t i = 0; i < 4; ++i) {
    const int level = kWeightLevels[kFirst + i];
    bytes |= static_cast<std::uint32_t>(level < 0 ? -level : level) << (8 * i);
  }
  return bytes;
}();
static_assert(kWeightLevels[7] < 0 && kWeightLevels[8] >= 0, "half of the levels are negative");

// Codes of a lane in one group, as A.
template <WeightCode kCode>
struct LaneCodes;
template <>
struct LaneCodes<WeightCode::int8> {
  std::uint32_t codes[4];

  __device__ explicit LaneCodes(const std::byte* from) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    codes[0] = words.x;
    codes[1] = words.y;
    codes[2] = words.z;
    codes[3] = words.w;
  }
  // Their products with digits, summed over the group.
  __device__ void multiply(uint2 digits, float (&sums)[4]) const {
    std::int32_t d[4];
    mma_bytes(d, codes, digits);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = __int_as_float(d[i]) - kIntegerFloat;
  }
};
template <>
struct LaneCodes<WeightCode::int4> {
  std::uint32_t negative[4];
  std::uint32_t positive[4];

  __device__ explicit LaneCodes(const std::byte* from) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    decode(words.x, 0);
    decode(words.y, 2);
  }
  __device__ void multiply(uint2 digits, float (&sums)[4]) const {
    std::int32_t minus[4];
    std::int32_t plus[4];
    mma_bytes(minus, negative, digits);
    mma_bytes(plus, positive, digits);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = __int_as_float(plus[i]) - __int_as_float(minus[i]);
  }

 private:
  __device__ void decode(std::uint32_t word, int first) {
    const std::uint32_t flipped = word ^ 0x88888888u;
    negative[first] = permute_bytes(kLevelBytes<0>, kLevelBytes<4>, word);
    positive[first] = permute_bytes(kLevelBytes<8>, kLevelBytes<12>, flipped);
    negative[first + 1] = permute_bytes(kLevelBytes<0>, kLevelBytes<4>, word >> 16);
    positive[first + 1] = permute_bytes(kLevelBytes<8>, kLevelBytes<12>, flipped >> 16);
  }
};

// Inputs of up to two tokens in shared memory, as digits.
template <WeightCode kCode, typename T>
class DigitInputs {
 public:
  static constexpr int kOfToken = kDigits;  // columns of the inputs' matrix

  // `shared` has digit_bytes().
  __device__ DigitInputs(const CodedProductParams& p, std::byte* shared)
      : p_(p), stride_(digit_stride(p.columns)) {
    scales_ = reinterpret_cast<float*>(shared);
    sums_ = scales_ + p.columns * kMmaColumns;
    digits_ = shared + p.columns * kColumnScales<kCode> * static_cast<int>(sizeof(float));
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    // Columns without a digit repeat another one; nobody reads their products.
    const int column = lane / 4 < p.tokens * kDigits ? lane / 4 : 0;
    own_ = digits_ + column * stride_ + lane % 4 * 8;
    own_scales_ = scales_ + lane % 4 * 2;
    own_sums_ = sums_ + lane % 4 * 2;
  }

  // What does not depend on the kernel before.
  __device__ void prepare() {}
  // Writes the digits of all tokens' elements, which are `stride` bytes apart, by all threads of
  // the block; a warp has a column of tiles of one token at a time.
  __device__ void load(const std::byte* x, std::int64_t stride) {
    constexpr int kAtOnce = 4;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    for (int token = 0; token < p_.tokens; ++token) {
      const auto* const of_token = reinterpret_cast<const T*>(x + token * stride);
      for (int first = static_cast<int>(threadIdx.x) / kWarp; first < p_.columns;
           first += kAtOnce * warps) {
        float4 inputs[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) inputs[i] = load_four(of_token, first + i * warps);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i * warps < p_.columns) write(inputs[i], first + i * warps, token);
        }
      }
    }
  }

  // acc += a tile times the inputs of its column.
  __device__ __forceinline__ void multiply(const std::byte* tile, int column,
                                           float (&acc)[4]) const {
    using Tile = CodedTile<kCode>;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::byte* const line = tile + lane / 4 * kTileGroups * 4;
    std::uint32_t scales[kTileGroups];
    load_line(line, scales);
    float of_tile[4] = {};
#pragma unroll
    for (int group = 0; group < kTileGroups; ++group) {
      const LaneCodes<kCode> codes(
          tile + (Tile::kFirstCode + (group * kWarp + lane) * Tile::kLaneWords) * 4);
      float sums[4];
      codes.multiply(*reinterpret_cast<const uint2*>(own_ + column * kTileInputs +
                                                     group * static_cast<int>(kWeightGroup)),
                     sums);
      add_products(scales[group], sums[0], sums[1], sums[2], sums[3], of_tile);
    }
    const float2 digit = *reinterpret_cast<const float2*>(own_scales_ + column * kMmaColumns);
    acc[0] = fmaf(digit.x, of_tile[0], acc[0]);
    acc[1] = fmaf(digit.y, of_tile[1], acc[1]);
    acc[2] = fmaf(digit.x, of_tile[2], acc[2]);
    acc[3] = fmaf(digit.y, of_tile[3], acc[3]);
    if constexpr (Tile::kHasOffsets) {
      std::uint32_t offsets[kTileGroups];
      load_line(line + Tile::kScaleWords * 4, offsets);
#pragma unroll
      for (int group = 0; group < kTileGroups; ++group) {
        const float2 sum = *reinterpret_cast<const float2*>(
            own_sums_ + (column * kTileGroups + group) * kMmaColumns);
        add_products(offsets[group], sum.x, sum.y, sum.x, sum.y, acc);
      }
    }
  }

 private:
  // A row's numbers of the four groups, and those of the row eight below.
  __device__ static void load_line(const std::byte* from, std::uint32_t (&pairs)[kTileGroups]) {
    static_assert(kTileGroups == 4);
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    pairs[0] = words.x;
    pairs[1] = words.y;
    pairs[2] = words.z;
    pairs[3] = words.w;
  }
  // to += two numbers in f16, of a lane's two rows, times its results a to d.
  __device__ static void add_products(std::uint32_t numbers, float a, float b, float c, float d,
                                      float (&to)[4]) {
    const float2 of_row = __half22float2(as_half2(numbers));
    to[0] = fmaf(of_row.x, a, to[0]);
    to[1] = fmaf(of_row.x, b, to[1]);
    to[2] = fmaf(of_row.y, c, to[2]);
    to[3] = fmaf(of_row.y, d, to[3]);
  }

  // This lane's four inputs of a column, zero where there are none.
  __device__ float4 load_four(const T* x, int column) const {
    const int input = column * kTileInputs + static_cast<int>(threadIdx.x) % kWarp * 4;
    if (input >= p_.inputs) return {0.0f, 0.0f, 0.0f, 0.0f};
    const uint2 bits = *reinterpret_cast<const uint2*>(x + input);
    const auto* const values = reinterpret_cast<const T*>(&bits);
    return {to_float(values[0]), to_float(values[1]), to_float(values[2]), to_float(values[3])};
  }

  __device__ void write(float4 inputs, int column, int token) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const float values[4] = {inputs.x, inputs.y, inputs.z, inputs.w};
    // Magnitudes compare as integers do, NaN above infinity.
    std::uint32_t largest = 0;
#pragma unroll
    for (const float value : values) largest = max(largest, __float_as_uint(value) & 0x7fffffffu);
    largest = __reduce_max_sync(kAllLanes, largest);
    // The largest is below 2^(exponent - 126) and becomes an integer of at most 2^22. Inputs below
    // 2^-104 are scaled as if one were larger, so that the scale and its inverse are finite.
    const std::uint32_t exponent = max(largest >> 23, 22u);
    const float inverse = __uint_as_float((275u - exponent) << 23);
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // 128 in each digit makes them positive, without carries from a negative one.
      const std::int32_t integer = __float_as_int(fmaf(values[i], inverse, kIntegerFloat));
      words[i] = static_cast<std::uint32_t>(integer - kIntegerBits + 0x808080) ^ 0x808080u;
    }
    // The order of inputs in a word of codes.
    if constexpr (kCode == WeightCode::int8) {
      const std::uint32_t second = words[1];
      words[1] = words[2];
      words[2] = second;
    }
    std::byte* const to = digits_ + token * kDigits * stride_ + column * kTileInputs + lane * 4;
    write_digit<0>(words, to);
    write_digit<1>(words, to + stride_);
    write_digit<2>(words, to + 2 * stride_);
    if (lane < kDigits) {
      const bool is_finite = largest < 0x7f800000u;
      const std::uint32_t of_digit = exponent - 21u + 8u * static_cast<unsigned>(lane);
      const float scale = __uint_as_float(is_finite ? of_digit << 23 : kNan);
      scales_[column * kMmaColumns + token * kDigits + lane] = scale;
    }
    if constexpr (CodedTile<kCode>::kHasOffsets) write_sums(values, column, token);
  }
  // Byte kDigit of four words.
  template <int kDigit>
  __device__ static void write_digit(const std::uint32_t (&words)[4], std::byte* to) {
    const std::uint32_t low = __byte_perm(words[0], words[1], kDigit | (kDigit + 4) << 4);
    const std::uint32_t high = __byte_perm(words[2], words[3], kDigit | (kDigit + 4) << 4);
    *reinterpret_cast<std::uint32_t*>(to) = __byte_perm(low, high, 0x5410);
  }
  // Sums of each group's inputs, at the token's first digit; zero at its others.
  __device__ void write_sums(const float (&values)[4], int column, int token) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float sum = (values[0] + values[1]) + (values[2] + values[3]);
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (lane % 8 >= kDigits) return;
    sums_[(column * kTileGroups + lane / 8) * kMmaColumns + token * kDigits + lane % 8] =
        lane % 8 == 0 ? sum : 0.0f;
  }

  static constexpr std::uint32_t kNan = 0x7fffffffu;

  const CodedProductParams& p_;
  int stride_;
  float* scales_;      // [columns of tiles, kMmaColumns]
  float* sums_;        // [groups, kMmaColumns] if codes have offsets
  std::byte* digits_;  // [tokens, kDigits], each of `stride_` bytes, the lowest digit first
  // This lane's part of them.
  const std::byte* own_;
  const float* own_scales_;
  const float* own_sums_;
};

}  // namespace sluice::cuda
