// Attention of a few queries to the rows that one warp is given.
#pragma once

#include "kernels/decode_work.cuh"

namespace sluice::cuda {

// Running attention of one warp: up to kBunch queries over the rows it was given. Lane l holds
// query l / 4; rows 8 to 15 of the matrices carry what rounding took from rows 0 to 7.
template <typename T, int kHeadDim>
class DecodeWarp {
  using Shape = DecodeShape<kHeadDim>;

 public:
  // `q`: shared memory [queries, head_dim].
  __device__ DecodeWarp(const float* q, int queries) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int channel = step * 16 + half * 8 + lane % 4 * 2;
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

  // Adds this warp's rows of a tile, of which the first `count` exist and the rest are zero; those
  // from `newest` on are the newest. They are two of each lot, one for either matrix.
  __device__ void add(const std::byte* tile, int count, int newest, float scale) {
    // Two sums of each matrix are shorter chains of instructions that wait for each other, if there
    // are registers for them.
    constexpr int kChains = kHeadDim <= 128 ? 2 : 1;
    float logits[4][4] = {};
    const int lane = threadIdx.x % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const std::byte* const rows = tile + lane % 8 * Shape::kLotStride + 2 * warp * Shape::kRowBytes;
    const std::byte* const key = rows + lane / 16 * Shape::kRowBytes + lane / 8 % 2 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      std::uint32_t k[4];
      load_matrices(k, key + step * 32);
      mma(T(), logits[step % kChains], q_[step], k[0], k[1]);
      mma(T(), logits[2 + step % kChains], q_[step], k[2], k[3]);
    }
    float weights[4];
    soften(logits, count - 2 * warp, newest - 2 * warp, scale, weights);
    std::uint32_t p[4];
    split(weights[0], weights[1], p[0], p[1]);
    split(weights[2], weights[3], p[2], p[3]);
    const std::byte* const value =
        rows + lane / 8 % 2 * Shape::kRowBytes + kHeadDim * sizeof(T) + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < Shape::kSteps; ++step) {
      std::uint32_t v[4];
      load_matrices_transposed(v, value + step * 32);
      mma(T(), out_[2 * step], p, v[0], v[1]);
      mma(T(), out_[2 * step + 1], p, v[2], v[3]);
    }
  }

  // For each of the first `queries`: outputs that are not normalised yet, in rows of `stride`; the
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
#pragma unroll
    for (int tile = 0; tile < 2 * Shape::kSteps; ++tile) {
      float* const to = out + lane / 4 * stride + tile * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(to) =
          make_float2(out_[tile][0] + out_[tile][2], out_[tile][1] + out_[tile][3]);
    }
  }

 private:
  // Two numbers as pairs of T whose sums they are, but for 2^-17 (bf16) of their size.
  __device__ static void split(float x, float y, std::uint32_t& high, std::uint32_t& low) {
    const T x_high = from_float<T>(x);
    const T y_high = from_float<T>(y);
    high = pack(T(), to_float(x_high), to_float(y_high));
    low = pack(T(), x - to_float(x_high), y - to_float(y_high));
  }

  // Turns logits of the rows from this warp's first on, of which `count` are left in the tile, into
  // weights relative to the highest so far, and what was summed before with it.
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
