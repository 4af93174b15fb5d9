// Prefill attention with mma.sync, for every device from sm_80 on.
// Source: Dao 2023, "FlashAttention-2": queries stay in shared memory, keys and values pass through
// one buffer each, the values of a block arriving under its logits and the next keys under its sum.
#include <algorithm>

#include "kernels/attention/prefill_common.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/error.h"
#include "lib/gpu_sizes.h"

namespace sluice::cuda {
namespace {

template <int kHeadDim>
struct GenericShape {
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kFragments = kHeadDim <= 128 ? 2 : 1;  // of 16 packed rows, per warp
  static constexpr int kRows = 16 * kFragments * kWarps;
  static constexpr int kKeys = 64;
  // An odd number of 16-byte pieces, so that eight rows of a matrix lie in different banks.
  static constexpr int kPitch = kHeadDim + 8;
  static constexpr int kBytes = (kRows + 2 * kKeys) * kPitch * 2;
  static_assert(kBytes <= gpu::kLeastSharedBytes);
};

// Thread blocks that run on a multiprocessor together: 2, as registers allow, where its shared
// memory holds them. It has 1 KiB more than a block may use, and takes 1 KiB for each block.
int blocks_per_sm(int bytes, const DeviceLimits& device) {
  constexpr int kOfBlock = 1 << 10;
  return std::clamp((device.shared_bytes + kOfBlock) / (bytes + kOfBlock), 1, 2);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void store_queries(const PrefillArgs& args, const Tile& tile, T* to) {
  using Shape = GenericShape<kHeadDim>;
  constexpr int kPieces = kHeadDim / 8;
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kPieces; i += Shape::kThreads) {
    const int row = i / kPieces;
    const int channel = i % kPieces * 8;
    *reinterpret_cast<uint4*>(to + row * Shape::kPitch + channel) =
        load_query<T>(args, tile, tile.first_row + row, channel);
  }
}

// The keys (offset 0) or values (offset head_dim) of a block; rows past the last are zeros.
template <typename T, int kHeadDim>
__device__ __forceinline__ void copy_block(const PrefillArgs& args, const Tile& tile,
                                           const std::byte* rows, int block, int offset, T* to) {
  using Shape = GenericShape<kHeadDim>;
  constexpr int kPieces = kHeadDim / 8;
  static_assert(kPageTokens % Shape::kKeys == 0, "a block of keys is of one page");
  const std::int64_t place = place_of(args, tile, block * Shape::kKeys);
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kKeys * kPieces; i += Shape::kThreads) {
    const int key = i / kPieces;
    const int channel = i % kPieces * 8;
    const bool exists = block * Shape::kKeys + key < tile.count;
    const std::byte* const from = rows + (exists ? place + key : 0) * args.row_bytes +
                                  (offset + channel) * static_cast<int>(sizeof(T));
    copy_async_or_zero(to + key * Shape::kPitch + channel, from, exists);
  }
  copy_async_commit();
}

// s = q k^T for a warp's rows.
template <typename T, int kHeadDim, int kFragments, int kCount>
__device__ __forceinline__ void multiply_keys(const T* q, const T* k,
                                              float (&s)[kFragments][kCount]) {
  using Shape = GenericShape<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* const q_row = q + lane % 16 * Shape::kPitch + lane / 16 * 8;
  const T* const k_row = k + (lane / 16 * 8 + lane % 8) * Shape::kPitch + lane / 8 % 2 * 8;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) s[f][i] = 0;
  }
#pragma unroll
  for (int c = 0; c < kHeadDim; c += 16) {
    std::uint32_t a[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) load_matrices(a[f], q_row + f * 16 * Shape::kPitch + c);
#pragma unroll
    for (int n = 0; n < Shape::kKeys; n += 16) {
      std::uint32_t b[4];
      load_matrices(b, k_row + n * Shape::kPitch + c);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        mma(T(), reinterpret_cast<float(&)[4]>(s[f][n / 2]), a[f], b[0], b[1]);
        mma(T(), reinterpret_cast<float(&)[4]>(s[f][n / 2 + 4]), a[f], b[2], b[3]);
      }
    }
  }
}

// o += p v for a warp's rows.
template <typename T, int kHeadDim, int kFragments, int kCount, int kOut>
__device__ __forceinline__ void multiply_values(const float (&p)[kFragments][kCount], const T* v,
                                                float (&o)[kFragments][kOut]) {
  using Shape = GenericShape<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const T* const v_row = v + lane % 16 * Shape::kPitch + lane / 16 * 8;
#pragma unroll
  for (int key = 0; key < Shape::kKeys; key += 16) {
    std::uint32_t a[kFragments][4];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[f][i] = pack(T(), p[f][key / 2 + 2 * i], p[f][key / 2 + 2 * i + 1]);
      }
    }
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 16) {
      std::uint32_t b[4];
      load_matrices_transposed(b, v_row + key * Shape::kPitch + c);
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        mma(T(), reinterpret_cast<float(&)[4]>(o[f][c / 2]), a[f], b[0], b[1]);
        mma(T(), reinterpret_cast<float(&)[4]>(o[f][c / 2 + 4]), a[f], b[2], b[3]);
      }
    }
  }
}

template <int kKeys, int kCount>
__device__ __forceinline__ void mask_block(const PrefillArgs& args, const Tile& tile, int block,
                                           int row, float (&s)[kCount]) {
  const int first = block * kKeys + static_cast<int>(threadIdx.x) % 4 * 2;
  const int limit[2] = {visible_of_row(args, tile, row) - first,
                        visible_of_row(args, tile, row + 8) - first};
  mask_columns(s, limit);
}

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(GenericShape<kHeadDim>::kThreads)
    prefill_generic(const __grid_constant__ PrefillArgs args) {
  using Shape = GenericShape<kHeadDim>;
  constexpr int kFragments = Shape::kFragments;
  extern __shared__ __align__(16) std::byte shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + Shape::kRows * Shape::kPitch;
  T* const v = k + Shape::kKeys * Shape::kPitch;
  const Tile tile = tile_of<Shape::kRows, Shape::kKeys>(args, static_cast<int>(blockIdx.x));
  const std::byte* const rows = args.rows[tile.kv_head];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp_row = warp * 16 * kFragments;
  const int row = tile.first_row + warp_row + lane / 4;

  float o[kFragments][kHeadDim / 2] = {};
  RowPair softmax[kFragments];
  if (tile.first_block < tile.end_block) {
    copy_block<T, kHeadDim>(args, tile, rows, tile.end_block - 1, 0, k);
    store_queries<T, kHeadDim>(args, tile, q);
  }
  for (int block = tile.end_block - 1; block >= tile.first_block; --block) {
    copy_async_wait<0>();
    __syncthreads();
    copy_block<T, kHeadDim>(args, tile, rows, block, kHeadDim, v);
    float s[kFragments][Shape::kKeys / 2];
    multiply_keys<T, kHeadDim>(q + warp_row * Shape::kPitch, k, s);
    copy_async_wait<0>();
    __syncthreads();
    if (block > tile.first_block) copy_block<T, kHeadDim>(args, tile, rows, block - 1, 0, k);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      if (block >= tile.masked_block) {
        mask_block<Shape::kKeys>(args, tile, block, row + 16 * f, s[f]);
      }
      float correction[2];
      softmax_step(s[f], softmax[f], args.scale, correction);
      rescale(o[f], correction);
    }
    multiply_values<T, kHeadDim>(s, v, o);
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    store_row(args, tile, row + 16 * f, o[f], 0, softmax[f]);
    store_row(args, tile, row + 16 * f + 8, o[f], 1, softmax[f]);
  }
}

template <typename T, int kHeadDim>
void launch_generic(PrefillArgs& args, const Launch& launch) {
  using Shape = GenericShape<kHeadDim>;
  const int blocks_at_once = blocks_per_sm(Shape::kBytes, *launch.device);
  divide_prefill(args, {Shape::kRows, Shape::kKeys, blocks_at_once}, launch);
  const auto kernel = prefill_generic<T, kHeadDim>;
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
          "shared memory of attend_prefill");
  const auto blocks = static_cast<unsigned>(args.tiles * args.kv_heads * args.splits);
  kernel<<<blocks, Shape::kThreads, Shape::kBytes, launch.stream>>>(args);
  require_launch("attend_prefill");
}

}  // namespace

void attend_prefill_generic(PrefillArgs args, DType dtype, const Launch& launch) {
  dispatch_rows(dtype, [&](auto element) {
    dispatch_head_dim(args.head_dim, [&](auto head_dim) {
      launch_generic<decltype(element), decltype(head_dim)::value>(args, launch);
    });
  });
  merge_prefill_splits(args, launch);
}

}  // namespace sluice::cuda
