// Attention of a few queries to the rows of one warp.
#pragma once

#include "kernels/attention/decode_work.cuh"

namespace sluice::cuda {

// Running attention of one warp: up to kBunch queries over the rows it was given. Lane l holds
// query l / 4; rows 8 to 15 of the matrices carry the rounding errors of rows 0 to 7.
template <typename Shape>
class DecodeWarp {
  using T = MathOf<typename Shape::Key>;
  static constexpr int kHeadDim = Shape::kHeadDim;
  static constexpr bool kCoded = kIsCoded<typename Shape::Key>;
  static constexpr bool kInt4 = kIsInt4<typename Shape::Value>;

 public:
  // `q`: shared memory [queries, head_dim].
  __device__ DecodeWarp(const float* q, int queries) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = query_channel(step, half, lane);
        float2 pair = make_float2(0.0f, 0.0f);
        if (lane / 4 < queries) {
          pair = *reinterpret_cast<const float2*>(q + lane / 4 * kHeadDim + channel);
        }
        split(pair.x, pair.y, q_[step][2 * half], q_[step][2 * half + 1]);
      }
    }
#pragma unroll
    for (auto& tile : out_) {
      for (float& x : tile) x = 0.0f;
    }
  }

  // Adds this warp's rows of a tile. The first `count` rows exist, the others are zero; rows from
  // `newest` on are the newest. The warp has two rows of each lot, one per matrix.
  __device__ void add(const std::byte* tile, int count, int newest, float scale) {
    float logits[4][4] = {};
    const int lane = threadIdx.x % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const std::byte* const rows = tile + 2 * warp * Shape::kRowBytes;
    if constexpr (kCoded) {
      multiply_codes(rows, lane, logits);
    } else if constexpr (Shape::kWholeLines) {
      multiply_keys_of_lines(rows, lane, logits);
    } else {
      multiply_keys(rows, lane, logits);
    }
    float weights[4];
    float value_scales[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (kCoded) apply_scales(rows, lane, logits, value_scales);
    soften(logits, count - 2 * warp, newest - 2 * warp, scale, weights);
    if constexpr (kCoded) {
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] *= value_scales[i];
    }
    std::uint32_t p[4];
    split(weights[0], weights[1], p[0], p[1]);
    split(weights[2], weights[3], p[2], p[3]);
    const std::byte* const values = rows + Shape::kKeyBytes;
    if constexpr (kInt4) {
      add_int4(rows, lane, p);
    } else if constexpr (kCoded) {
      add_codes(values, lane, p);
    } else if constexpr (Shape::kWholeLines) {
      add_values_of_lines(values, lane, p);
    } else {
      add_values(values, lane, p);
    }
  }

  // Stores, for each of the first `queries`: outputs, not normalised yet, in rows of `stride`; the
  // highest logit (base 2); the sums of weights relative to it, of all rows and of the newest.
  __device__ void store(float* out, int stride, float* highest, float2* sums, int queries) {
    const int lane = threadIdx.x % kWarp;
    const auto over_lanes = [](float x) {
      x += __shfl_xor_sync(kAllLanes, x, 1);
      return x + __shfl_xor_sync(kAllLanes, x, 2);
    };
    const float2 sum = make_float2(over_lanes(sum_), over_lanes(newest_sum_));
    if (lane / 4 >= queries) return;
    if (lane % 4 == 0) {
      highest[lane / 4] = highest_;
      sums[lane / 4] = sum;
    }
    float* const to = out + lane / 4 * stride;
#pragma unroll
    for (int tile = 0; tile < 2 * Shape::kSteps; ++tile) {
      const float first = out_[tile][0] + out_[tile][2];
      const float second = out_[tile][1] + out_[tile][3];
      to[value_channel(tile, lane % 4 * 2)] = first;
      to[value_channel(tile, lane % 4 * 2 + 1)] = second;
    }
  }

 private:
  // Rows of whole lines are read in chunks of 16 bytes. A lane reads the chunks of its quarter of a
  // row of keys, two steps of the multiplication each, and of four rows of values the kValueChunks
  // of its column, eight tiles each. The order of channels below follows from that.
  static constexpr int kValueChunks = kHeadDim / 64;
  // Coded rows: tiles in fours, of 32 channels; two are left if head_dim is an odd multiple of 16.
  static constexpr int kQuadTiles = kHeadDim / 32 * 4;
  // Values in int4: tiles in eights, of two groups of 32 channels; four are left, or two of half a
  // group.
  static constexpr int kOctoTiles = kHeadDim / 64 * 8;
  static constexpr int kInt4Groups = groups_of(kHeadDim);
  // Separate sums per logit, as registers allow, for shorter dependency chains.
  static constexpr int kChains = kHeadDim <= 128 ? 2 : 1;

  // Channel of the query's element 2 (lane % 4) in one half of a step.
  __device__ static int query_channel(int step, int half, int lane) {
    if (kCoded) return step * 16 + lane % 4 * 4 + half * 2;
    if (Shape::kWholeLines) return step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + half * 2;
    return step * 16 + half * 8 + lane % 4 * 2;
  }
  // Channel of a column of a tile of out_.
  __device__ static int value_channel(int tile, int column) {
    if (kInt4) {
      if (tile >= kOctoTiles) {
        const int left = tile - kOctoTiles;
        return kOctoTiles * 8 + left / 2 * 16 + column * 2 + left % 2;
      }
      return tile / 8 * 64 + column / 4 * 32 + tile % 8 / 4 * 16 + column % 4 * 4 + tile % 4;
    }
    if (kCoded) {
      return tile < kQuadTiles ? tile / 4 * 32 + column * 4 + tile % 4
                               : kQuadTiles * 8 + column * 2 + tile % 2;
    }
    if (Shape::kWholeLines) return (column * kValueChunks + tile / 8) * 8 + tile % 8;
    return tile * 8 + column;
  }

  // Logits of the warp's 16 rows; `rows` points to the first two. logits[2 r + c]: of row r of the
  // warp's two in every lot, the sum over every kChains-th step from c on.
  __device__ void multiply_keys(const std::byte* rows, int lane, float (&logits)[4][4]) const {
    const std::byte* const key =
        rows + lane % 8 * Shape::kLotStride + lane / 16 * Shape::kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      std::uint32_t k[4];
      load_matrices(k, key + step * 32);
      mma(T(), logits[step % kChains], q_[step], k[0], k[1]);
      mma(T(), logits[2 + step % kChains], q_[step], k[2], k[3]);
    }
  }

  // Codes: a lane of a matrix of 16-bit elements gets four codes, which are one step's.
  __device__ void multiply_codes(const std::byte* rows, int lane, float (&logits)[4][4]) const {
    const std::byte* const key =
        rows + lane % 8 * Shape::kLotStride + lane / 16 * Shape::kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
    for (int pair = 0; pair < Shape::kSteps; pair += 2) {
      std::uint32_t k[4];
      load_matrices(k, key + pair * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int step = pair + i % 2;
        if (step >= Shape::kSteps) continue;
        const uint2 codes = code_pairs(k[i]);
        mma(T(), logits[i / 2 * 2 + step % kChains], q_[step], codes.x, codes.y);
      }
    }
  }

  // The row of this lane's logits and weights i, of the warp's 16.
  __device__ static int row_of(int i, int lane) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
  // Where such a row begins, for row lane % 16.
  __device__ static int offset_of_row(int lane) {
    return lane % 8 * Shape::kLotStride + lane / 8 % 2 * Shape::kRowBytes;
  }

  // Multiplies logits by the scales of their keys and finds those of values in int8. Each lane
  // reads one of the 32 scales of the warp's rows.
  __device__ static void apply_scales(const std::byte* rows, int lane, float (&logits)[4][4],
                                      float (&value_scales)[4]) {
    const float own =
        scale_of(rows + offset_of_row(lane) + (kInt4 ? 0 : lane / 16 * Shape::kKeyBytes));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row_of(i, lane);
      const float key_scale = __shfl_sync(kAllLanes, own, row);
      if (!kInt4) value_scales[i] = __shfl_sync(kAllLanes, own, 16 + row);
#pragma unroll
      for (int chain = 0; chain < 2; ++chain) {
        logits[i / 2 * 2 + chain][i % 2] *= key_scale;
        logits[i / 2 * 2 + chain][i % 2 + 2] *= key_scale;
      }
    }
  }

  // Adds the products of the weights with codes in the same bytes of four rows' words.
  template <int kTiles>
  __device__ void add_words(int first, const std::uint32_t (&p)[4],
                            const std::uint32_t (&rows)[4]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const unsigned bytes = 0x4400u + 0x1111u * static_cast<unsigned>(i);
      mma(T(), out_[first + i], p, code_pair(__byte_perm(rows[0], rows[1], bytes)),
          code_pair(__byte_perm(rows[2], rows[3], bytes)));
    }
  }

  // A lane reads words of four codes, and in the end of a row two codes, of its column of four
  // tiles or of two.
  __device__ void add_codes(const std::byte* values, int lane, const std::uint32_t (&p)[4]) {
    const std::byte* const even = values + lane % 4 * 2 * Shape::kLotStride;
    const std::byte* const of_rows[4] = {even, even + Shape::kLotStride, even + Shape::kRowBytes,
                                         even + Shape::kLotStride + Shape::kRowBytes};
    std::uint32_t words[4];
#pragma unroll
    for (int tile = 0; tile < kQuadTiles; tile += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = *reinterpret_cast<const std::uint32_t*>(of_rows[i] + tile * 8 + lane / 4 * 4);
      }
      add_words<4>(tile, p, words);
    }
    if constexpr (kQuadTiles < 2 * Shape::kSteps) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] =
            *reinterpret_cast<const std::uint16_t*>(of_rows[i] + kQuadTiles * 8 + lane / 4 * 2);
      }
      add_words<2>(kQuadTiles, p, words);
    }
  }

  // The scales of group `group` + lane / 16 of values in int4, as pairs of bf16: of this lane's
  // rows 0 and 1, and of 2 and 3. Each lane reads the scale of one row and group.
  __device__ static uint2 int4_scales(const std::byte* rows, int lane, int group) {
    const int own_group = min(group + lane / 16, kInt4Groups - 1);
    const std::uint32_t own =
        int4_scale_bits(rows + offset_of_row(lane) + Shape::kKeyBytes, own_group);
    std::uint32_t of_rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of_rows[i] = __shfl_sync(kAllLanes, own, lane / 16 * 16 + row_of(i, lane));
    }
    return make_uint2(of_rows[0] | of_rows[1] << 16, of_rows[2] | of_rows[3] << 16);
  }

  // Adds the products of the weights with values in int4: tile i has the code i / kBytes of byte i
  // % kBytes of four rows' words.
  template <int kTiles, int kBytes>
  __device__ void add_int4_words(int first, const std::uint32_t (&p)[4],
                                 const std::uint32_t (&rows)[4], const uint2& scales) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const unsigned bytes = 0x4400u + 0x1111u * static_cast<unsigned>(i % kBytes);
      const auto elements = [&](std::uint32_t even, std::uint32_t odd, std::uint32_t scale) {
        const std::uint32_t both = __byte_perm(even, odd, bytes);
        return multiply_pairs(int4_pair(i < kBytes ? both : both >> 4), scale);
      };
      mma(T(), out_[first + i], p, elements(rows[0], rows[1], scales.x),
          elements(rows[2], rows[3], scales.y));
    }
  }

  // A lane reads words of eight codes, of one of two groups, and in the end of a row half of one.
  __device__ void add_int4(const std::byte* rows, int lane, const std::uint32_t (&p)[4]) {
    const std::byte* const even = rows + Shape::kKeyBytes + lane % 4 * 2 * Shape::kLotStride;
    const std::byte* const of_rows[4] = {even, even + Shape::kLotStride, even + Shape::kRowBytes,
                                         even + Shape::kLotStride + Shape::kRowBytes};
    std::uint32_t words[4];
#pragma unroll
    for (int tile = 0; tile < kOctoTiles; tile += 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = *reinterpret_cast<const std::uint32_t*>(of_rows[i] + tile * 4 + lane / 4 * 4);
      }
      add_int4_words<8, 4>(tile, p, words, int4_scales(rows, lane, tile / 4));
    }
    constexpr int kLeft = 2 * Shape::kSteps - kOctoTiles;
    if constexpr (kLeft > 0) {
      static_assert(kLeft <= 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] =
            *reinterpret_cast<const std::uint16_t*>(of_rows[i] + kOctoTiles * 4 + lane / 4 * 2);
      }
      const uint2 scales = int4_scales(rows, lane, kInt4Groups - 1);
      add_int4_words<kLeft, 2>(kOctoTiles, p, words, scales);
    }
  }

  __device__ void add_values(const std::byte* values, int lane, const std::uint32_t (&p)[4]) {
    const std::byte* const value =
        values + lane % 8 * Shape::kLotStride + lane / 8 % 2 * Shape::kRowBytes + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      std::uint32_t v[4];
      load_matrices_transposed(v, value + step * 32);
      mma(T(), out_[2 * step], p, v[0], v[1]);
      mma(T(), out_[2 * step + 1], p, v[2], v[3]);
    }
  }

  // Two neighbouring chunks. Lanes with `swapped` read them in reverse order, so that simultaneous
  // reads have fewer bank conflicts.
  struct Chunks {
    uint4 first;
    uint4 second;

    __device__ Chunks(const std::byte* at, int apart, bool swapped) {
      const uint4 a = *reinterpret_cast<const uint4*>(at + (swapped ? apart : 0));
      const uint4 b = *reinterpret_cast<const uint4*>(at + (swapped ? 0 : apart));
      first = chosen(swapped, b, a);
      second = chosen(swapped, a, b);
    }
    __device__ static uint4 chosen(bool which, const uint4& x, const uint4& y) {
      return make_uint4(which ? x.x : y.x, which ? x.y : y.y, which ? x.z : y.z, which ? x.w : y.w);
    }
  };

  __device__ void multiply_keys_of_lines(const std::byte* rows, int lane,
                                         float (&logits)[4][4]) const {
    const std::byte* const key = rows + lane / 4 * Shape::kLotStride + lane % 4 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; step += 4) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const Chunks k(key + row * Shape::kRowBytes + step * 32, 64, lane / 4 % 2 != 0);
        mma(T(), logits[2 * row], q_[step], k.first.x, k.first.y);
        mma(T(), logits[2 * row + 1], q_[step + 1], k.first.z, k.first.w);
        mma(T(), logits[2 * row], q_[step + 2], k.second.x, k.second.y);
        mma(T(), logits[2 * row + 1], q_[step + 3], k.second.z, k.second.w);
      }
    }
  }

  __device__ static std::uint32_t word_at(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }

  // Adds eight tiles: chunk `chunk` of every column, of the first and second rows of two lots.
  __device__ void add_chunk(int chunk, const std::uint32_t (&p)[4], const uint4& first_even,
                            const uint4& first_odd, const uint4& second_even,
                            const uint4& second_odd) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const std::uint32_t halves = i % 2 == 0 ? 0x5410u : 0x7632u;
      mma(T(), out_[chunk * 8 + i], p,
          __byte_perm(word_at(first_even, i / 2), word_at(first_odd, i / 2), halves),
          __byte_perm(word_at(second_even, i / 2), word_at(second_odd, i / 2), halves));
    }
  }

  __device__ void add_values_of_lines(const std::byte* values, int lane,
                                      const std::uint32_t (&p)[4]) {
    const std::byte* const even =
        values + lane % 4 * 2 * Shape::kLotStride + lane / 4 * kValueChunks * 16;
    const std::byte* const odd = even + Shape::kLotStride;
    if constexpr (kValueChunks == 1) {
      const auto chunk = [](const std::byte* at) { return *reinterpret_cast<const uint4*>(at); };
      add_chunk(0, p, chunk(even), chunk(odd), chunk(even + Shape::kRowBytes),
                chunk(odd + Shape::kRowBytes));
    } else {
      const bool swapped = lane % 2 != 0;
#pragma unroll
      for (int c = 0; c < kValueChunks; c += 2) {
        const Chunks a(even + c * 16, 16, swapped);
        const Chunks b(odd + c * 16, 16, swapped);
        const Chunks x(even + Shape::kRowBytes + c * 16, 16, swapped);
        const Chunks y(odd + Shape::kRowBytes + c * 16, 16, swapped);
        add_chunk(c, p, a.first, b.first, x.first, y.first);
        add_chunk(c + 1, p, a.second, b.second, x.second, y.second);
      }
    }
  }

  // Splits each of two numbers into a sum of two of T, exact to 2^-17 (bf16) of its size.
  __device__ static void split(float x, float y, std::uint32_t& high, std::uint32_t& low) {
    const T x_high = from_float<T>(x);
    const T y_high = from_float<T>(y);
    high = pack(T(), to_float(x_high), to_float(y_high));
    low = pack(T(), x - to_float(x_high), y - to_float(y_high));
  }

  // Turns the logits of this warp's rows into weights relative to the highest logit so far, and
  // rescales the sums so far. `count`: existing rows of the tile from the warp's first row on.
  __device__ void soften(const float (&logits)[4][4], int count, int newest, float scale,
                         float (&weights)[4]) {
    const int lane = threadIdx.x % kWarp;
    const auto row = [&](int i) { return (lane % 4 * 2 + i % 2) * Shape::kLotRows + i / 2; };
    float highest = highest_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&even)[4] = logits[i / 2 * 2];
      const float(&odd)[4] = logits[i / 2 * 2 + 1];
      const float logit = (even[i % 2] + odd[i % 2] + (even[i % 2 + 2] + odd[i % 2 + 2])) * scale;
      weights[i] = row(i) < count ? logit : -INFINITY;
      // A NaN stays in the weights; fmaxf would hide it from the maximum only.
      highest = fmaxf(highest, weights[i]);
    }
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, 2));
    const float reference = highest == -INFINITY ? 0.0f : highest;
    const float factor = exp2_fast(highest_ - reference);
    sum_ *= factor;
    newest_sum_ *= factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights[i] = exp2_fast(weights[i] - reference);
      sum_ += weights[i];
      if (row(i) >= newest) newest_sum_ += weights[i];
    }
    if (__any_sync(kAllLanes, factor != 1.0f)) {
#pragma unroll
      for (auto& tile : out_) {
        for (float& x : tile) x *= factor;
      }
    }
    highest_ = highest;
  }

  std::uint32_t q_[Shape::kSteps][4];
  float out_[2 * Shape::kSteps][4];
  float highest_ = -INFINITY;
  float sum_ = 0.0f;  // this lane's part
  float newest_sum_ = 0.0f;
};

}  // namespace sluice::cuda
