// The kernel of prefill attention for Hopper: one producer thread keeps a pipeline of key and value
// blocks filled by bulk tensor copies (TMA); two or three consumer warpgroups of 64 packed rows
// multiply with wgmma. Each of them computes the softmax of a block while its product of the block
// before with the values runs, and they take turns at the tensor cores (ping-pong scheduling), so
// that one multiplies while the other exponentiates.
// Source: Shah et al. 2024, "FlashAttention-3".
#include <algorithm>

#include "kernels/attention/prefill_common.cuh"
#include "kernels/attention/prefill_wgmma.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/error.h"

namespace sluice::cuda {

template <int kHeadDim>
struct HopperShape {
  static constexpr int kConsumers = kHeadDim == 64 ? 3 : 2;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
  static constexpr int kTileRows = 64;  // per consumer
  static constexpr int kRows = kConsumers * kTileRows;
  static constexpr int kKeys = 128;
  static constexpr int kStages = kHeadDim == 64 ? 4 : 2;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;

  static constexpr int kBoxChannels = kSwizzleBytes / 2;
  static constexpr int kBoxes = kHeadDim / kBoxChannels;
  static constexpr int kQueryBox = kTileRows * kSwizzleBytes;  // bytes
  static constexpr int kBox = kKeys * kSwizzleBytes;
  static constexpr int kQueryBytes = kBoxes * kQueryBox;  // per consumer
  static constexpr int kStageBytes = kBoxes * kBox;       // of the keys, or the values
  static constexpr int kKeysOffset = kConsumers * kQueryBytes;
  static constexpr int kValuesOffset = kKeysOffset + kStages * kStageBytes;
  static constexpr int kBarriersOffset = kValuesOffset + kStages * kStageBytes;
  // Room to align the start to the swizzle's period.
  static constexpr int kBytes = kBarriersOffset + 4 * kStages * 8 + kSwizzleAtom;
};

struct HopperArgs {
  CUtensorMap map;  // of the rows, as [heads, count, 2 * head_dim]
  PrefillArgs prefill;
};

// Addresses of a block's shared memory.
template <int kHeadDim>
struct HopperShared {
  using Shape = HopperShape<kHeadDim>;
  std::uint32_t base;

  __device__ std::uint32_t queries(int consumer) const {
    return base + consumer * Shape::kQueryBytes;
  }
  __device__ std::uint32_t keys(int stage) const {
    return base + Shape::kKeysOffset + stage * Shape::kStageBytes;
  }
  __device__ std::uint32_t values(int stage) const {
    return base + Shape::kValuesOffset + stage * Shape::kStageBytes;
  }
  // Stages whose copy is complete, and those that all consumers have read.
  __device__ std::uint32_t keys_full(int stage) const { return barrier(0, stage); }
  __device__ std::uint32_t keys_empty(int stage) const { return barrier(1, stage); }
  __device__ std::uint32_t values_full(int stage) const { return barrier(2, stage); }
  __device__ std::uint32_t values_empty(int stage) const { return barrier(3, stage); }
  __device__ std::uint32_t barrier(int kind, int stage) const {
    return base + Shape::kBarriersOffset + (kind * Shape::kStages + stage) * 8;
  }
};

template <int kHeadDim>
__device__ __forceinline__ void init_barriers(const HopperShared<kHeadDim>& shared) {
  using Shape = HopperShape<kHeadDim>;
  constexpr int kConsumerWarps = Shape::kConsumers * kWarpgroup / kWarp;
  for (int stage = 0; stage < Shape::kStages; ++stage) {
    barrier_init(shared.keys_full(stage), 1);
    barrier_init(shared.keys_empty(stage), kConsumerWarps);
    barrier_init(shared.values_full(stage), 1);
    barrier_init(shared.values_empty(stage), kConsumerWarps);
  }
  barrier_init_fence();
}

// Block i of a tile, counted from the first that it sees, is in stage i % kStages in pass
// i / kStages. Blocks are read upwards, so that thread blocks that start together read the same
// rows together.
template <int kHeadDim>
__device__ __forceinline__ int stage_of(int i) {
  return i % HopperShape<kHeadDim>::kStages;
}
template <int kHeadDim>
__device__ __forceinline__ int parity_of(int i) {
  return i / HopperShape<kHeadDim>::kStages % 2;
}

// Starts the copy of the keys (channel 0) or values (channel head_dim) of block i.
template <int kHeadDim>
__device__ __forceinline__ void fill_stage(const HopperArgs& args, const Tile& tile, int i,
                                           int channel, std::uint32_t to, std::uint32_t full,
                                           std::uint32_t empty) {
  using Shape = HopperShape<kHeadDim>;
  static_assert(Shape::kKeys == kPageTokens, "a block of keys is a page");
  const auto row =
      static_cast<int>(place_of(args.prefill, tile, (tile.first_block + i) * Shape::kKeys));
  barrier_wait(empty, parity_of<kHeadDim>(i) ^ 1);
  barrier_expect(full, Shape::kStageBytes);
#pragma unroll
  for (int box = 0; box < Shape::kBoxes; ++box) {
    copy_box(to + box * Shape::kBox, &args.map, channel + box * Shape::kBoxChannels, row,
             tile.kv_head, full);
  }
}

// One thread: keys run one block ahead of values, as they are consumed.
template <int kHeadDim>
__device__ __forceinline__ void produce(const HopperArgs& args, const Tile& tile,
                                        const HopperShared<kHeadDim>& shared) {
  const int blocks = tile.end_block - tile.first_block;
  for (int i = 0; i <= blocks; ++i) {
    if (i < blocks) {
      const int stage = stage_of<kHeadDim>(i);
      fill_stage<kHeadDim>(args, tile, i, 0, shared.keys(stage), shared.keys_full(stage),
                           shared.keys_empty(stage));
    }
    if (i > 0) {
      const int stage = stage_of<kHeadDim>(i - 1);
      fill_stage<kHeadDim>(args, tile, i - 1, kHeadDim, shared.values(stage),
                           shared.values_full(stage), shared.values_empty(stage));
    }
  }
}

// Stores a consumer's queries in shared memory, rounded and swizzled.
template <typename T, int kHeadDim>
__device__ __forceinline__ void store_queries(const PrefillArgs& args, const Tile& tile,
                                              std::uint32_t to, int consumer) {
  using Shape = HopperShape<kHeadDim>;
  constexpr int kPieces = kHeadDim / 8;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int i = 0; i < Shape::kTileRows * kPieces; i += kWarpgroup) {
    const int row = (i + thread) / kPieces;
    const int piece = (i + thread) % kPieces;
    const uint4 x =
        load_query<T>(args, tile, tile.first_row + consumer * Shape::kTileRows + row, piece * 8);
    const std::uint32_t address =
        to + piece / 8 * Shape::kQueryBox + row * kSwizzleBytes + ((piece ^ row) % 8) * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
  }
  shared_write_fence();
  named_wait(1 + Shape::kConsumers + consumer, kWarpgroup);
}

// The consumers' turns at the tensor cores: a ring of named barriers, one per consumer.
__device__ __forceinline__ void wait_for_turn(int consumer) {
  named_wait(1 + consumer, 2 * kWarpgroup);
}
template <int kConsumers>
__device__ __forceinline__ void pass_turn(int consumer) {
  named_arrive(1 + (consumer + 1) % kConsumers, 2 * kWarpgroup);
}

// A consumer's state besides its accumulators.
template <int kHeadDim>
struct Consumer {
  HopperShared<kHeadDim> shared;
  std::uint64_t queries;  // descriptor
  int index;
  int visible[2];  // rows that this thread's two rows see
};

// Starts s = q k^T for block i.
template <typename T, int kHeadDim, int kCount>
__device__ __forceinline__ void multiply_keys(const Consumer<kHeadDim>& consumer, int i,
                                              float (&s)[kCount]) {
  using Shape = HopperShape<kHeadDim>;
  const std::uint64_t keys = describe(consumer.shared.keys(stage_of<kHeadDim>(i)));
#pragma unroll
  for (int c = 0; c < kHeadDim; c += 16) {
    const int box = c / Shape::kBoxChannels;
    const int within = c % Shape::kBoxChannels * 2;
    wgmma_shared(T(), s, advance(consumer.queries, box * Shape::kQueryBox + within),
                 advance(keys, box * Shape::kBox + within), c > 0);
  }
  wgmma_commit();
}

// Starts o += p v for block i.
template <typename T, int kHeadDim, int kPairs, int kOut>
__device__ __forceinline__ void multiply_values(const Consumer<kHeadDim>& consumer, int i,
                                                const std::uint32_t (&p)[kPairs],
                                                float (&o)[kOut]) {
  using Shape = HopperShape<kHeadDim>;
  const std::uint64_t values = describe(consumer.shared.values(stage_of<kHeadDim>(i)), Shape::kBox);
#pragma unroll
  for (int key = 0; key < Shape::kKeys; key += 16) {
    wgmma_registers(T(), o, p[key / 4], p[key / 4 + 1], p[key / 4 + 2], p[key / 4 + 3],
                    advance(values, key * kSwizzleBytes));
  }
  wgmma_commit();
}

template <int kCount>
__device__ __forceinline__ void mask_block(const int (&visible)[2], int first_key,
                                           float (&s)[kCount]) {
  const int first = first_key + static_cast<int>(threadIdx.x) % 4 * 2;
  const int limit[2] = {visible[0] - first, visible[1] - first};
  mask_columns(s, limit);
}

template <typename T, int kCount, int kPairs>
__device__ __forceinline__ void round_weights(const float (&s)[kCount],
                                              std::uint32_t (&p)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) p[i] = pack(T(), s[2 * i], s[2 * i + 1]);
}

__device__ __forceinline__ void release(std::uint32_t empty) {
  if (threadIdx.x % kWarp == 0) barrier_arrive(empty);
}

// The logits and weights of block i, whose first row is `first_key`, under the product of block
// i - 1 with its values.
template <typename T, int kHeadDim, bool kMasked, int kCount, int kPairs, int kOut>
__device__ __forceinline__ void consume_block(const PrefillArgs& args,
                                              const Consumer<kHeadDim>& consumer, int i,
                                              int first_key, float (&s)[kCount],
                                              std::uint32_t (&p)[kPairs], float (&o)[kOut],
                                              RowPair& rows) {
  using Shape = HopperShape<kHeadDim>;
  const HopperShared<kHeadDim>& shared = consumer.shared;
  const int stage = stage_of<kHeadDim>(i);
  const int before = stage_of<kHeadDim>(i - 1);
  barrier_wait(shared.keys_full(stage), parity_of<kHeadDim>(i));
  wait_for_turn(consumer.index);
  wgmma_fence();
  multiply_keys<T>(consumer, i, s);
  barrier_wait(shared.values_full(before), parity_of<kHeadDim>(i - 1));
  wgmma_fence();
  multiply_values<T>(consumer, i - 1, p, o);
  pass_turn<Shape::kConsumers>(consumer.index);
  wgmma_wait<1>();
  pin(s);
  release(shared.keys_empty(stage));
  if (kMasked) mask_block(consumer.visible, first_key, s);
  float correction[2];
  softmax_step(s, rows, args.scale, correction);
  wgmma_wait<0>();
  pin(o);
  release(shared.values_empty(before));
  rescale(o, correction);
  round_weights<T>(s, p);
}

// All blocks of a tile, at least one; leaves the sums of weighted values in o.
template <typename T, int kHeadDim, int kOut>
__device__ __forceinline__ void consume_blocks(const PrefillArgs& args, const Tile& tile,
                                               const Consumer<kHeadDim>& consumer, float (&o)[kOut],
                                               RowPair& rows) {
  using Shape = HopperShape<kHeadDim>;
  const HopperShared<kHeadDim>& shared = consumer.shared;
  const int blocks = tile.end_block - tile.first_block;
  const int unmasked = min(blocks, tile.masked_block - tile.first_block);
  int first_key = tile.first_block * Shape::kKeys;
  float s[Shape::kKeys / 2];
  std::uint32_t p[Shape::kKeys / 4];
  barrier_wait(shared.keys_full(0), 0);
  wgmma_fence();
  multiply_keys<T>(consumer, 0, s);
  wgmma_wait<0>();
  pin(s);
  release(shared.keys_empty(0));
  mask_block(consumer.visible, first_key, s);
  float correction[2];
  softmax_step(s, rows, args.scale, correction);
  round_weights<T>(s, p);
  int i = 1;
  for (; i < unmasked; ++i) {
    consume_block<T, kHeadDim, false>(args, consumer, i, 0, s, p, o, rows);
  }
  first_key += i * Shape::kKeys;
  for (; i < blocks; ++i, first_key += Shape::kKeys) {
    consume_block<T, kHeadDim, true>(args, consumer, i, first_key, s, p, o, rows);
  }
  const int last = stage_of<kHeadDim>(blocks - 1);
  barrier_wait(shared.values_full(last), parity_of<kHeadDim>(blocks - 1));
  wgmma_fence();
  multiply_values<T>(consumer, blocks - 1, p, o);
  wgmma_wait<0>();
  pin(o);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void consume(const PrefillArgs& args, const Tile& tile,
                                        const HopperShared<kHeadDim>& shared, int index) {
  using Shape = HopperShape<kHeadDim>;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int row =
      tile.first_row + index * Shape::kTileRows + thread / kWarp * 16 + thread % kWarp / 4;
  float o[kHeadDim / 2] = {};
  RowPair rows;
  if (tile.first_block < tile.end_block) {
    // The first turn is the first consumer's; at the end it takes back what the last one passes.
    if (index + 1 == Shape::kConsumers) pass_turn<Shape::kConsumers>(index);
    store_queries<T, kHeadDim>(args, tile, shared.queries(index), index);
    const Consumer<kHeadDim> consumer = {
        shared,
        describe(shared.queries(index)),
        index,
        {visible_of_row(args, tile, row), visible_of_row(args, tile, row + 8)}};
    consume_blocks<T>(args, tile, consumer, o, rows);
  }
  store_row(args, tile, row, o, 0, rows);
  store_row(args, tile, row + 8, o, 1, rows);
  if (tile.first_block < tile.end_block && index == 0) wait_for_turn(index);
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void attend_tile(const HopperArgs& args, std::byte* memory) {
  using Shape = HopperShape<kHeadDim>;
  const HopperShared<kHeadDim> shared = {(shared_address(memory) + kSwizzleAtom - 1) /
                                         kSwizzleAtom * kSwizzleAtom};
  const Tile tile = tile_of<Shape::kRows, Shape::kKeys>(args.prefill, static_cast<int>(blockIdx.x));
  const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (threadIdx.x == 0) init_barriers(shared);
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) produce(args, tile, shared);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    consume<T, kHeadDim>(args.prefill, tile, shared, warpgroup - 1);
  }
}

// Empty in code for other architectures; attend_prefill_hopper() does not start it there.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(HopperShape<kHeadDim>::kThreads, 1)
    prefill_hopper(const __grid_constant__ HopperArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte prefill_hopper_memory[];
  attend_tile<T, kHeadDim>(args, prefill_hopper_memory);
#endif
}

namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// Looks up the encoder in the driver at run time, so that the program links without the driver;
// null if the driver is too old.
EncodeTiled find_encoder() {
  constexpr unsigned kFirstVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status = cudaGetDriverEntryPointByVersion(
      "cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &result);
  ignore(status);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

// Encodes the rows in boxes of kKeys; false if the copy engine does not support the shape.
template <int kHeadDim>
bool encode(HopperArgs& args, DType dtype) {
  using Shape = HopperShape<kHeadDim>;
  static const EncodeTiled encoder = find_encoder();
  if (encoder == nullptr) return false;
  const PrefillArgs& prefill = args.prefill;
  const auto& [base, stride, count] = prefill.rows;
  if (count == 0) return true;  // never read
  const std::int64_t head_stride = prefill.kv_heads == 1 ? count * prefill.row_bytes : stride;
  if (head_stride <= 0 || head_stride % 16 != 0) return false;
  const cuuint64_t sizes[] = {2 * kHeadDim, static_cast<cuuint64_t>(count),
                              static_cast<cuuint64_t>(prefill.kv_heads)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(prefill.row_bytes),
                                static_cast<cuuint64_t>(head_stride)};
  const cuuint32_t box[] = {Shape::kBoxChannels, Shape::kKeys, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  return encoder(&args.map,
                 dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 3, const_cast<std::byte*>(base), sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Returns true if the program contains the kernel's code: without sm_90a the kernel is empty.
template <typename T, int kHeadDim>
bool kernel_exists() {
  constexpr int kRegistersOfCode = 64;
  static const bool exists = [] {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, prefill_hopper<T, kHeadDim>);
    ignore(status);
    return status == cudaSuccess && attributes.numRegs > kRegistersOfCode;
  }();
  return exists;
}

template <typename T, int kHeadDim>
bool launch_hopper(HopperArgs& args, DType dtype, const Launch& launch) {
  using Shape = HopperShape<kHeadDim>;
  const auto kernel = prefill_hopper<T, kHeadDim>;
  if (Shape::kBytes > launch.device->shared_bytes || !kernel_exists<T, kHeadDim>() ||
      !encode<kHeadDim>(args, dtype)) {
    return false;
  }
  divide_prefill(args.prefill, {Shape::kRows, Shape::kKeys, 1}, launch);
  require(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes),
          "shared memory of attend_prefill");
  const PrefillArgs& prefill = args.prefill;
  const auto blocks = static_cast<unsigned>(prefill.tiles * prefill.kv_heads * prefill.splits);
  kernel<<<blocks, Shape::kThreads, Shape::kBytes, launch.stream>>>(args);
  require_launch("attend_prefill");
  merge_prefill_splits(prefill, launch);
  return true;
}

}  // namespace

bool attend_prefill_hopper(PrefillArgs args, DType dtype, const Launch& launch) {
  if (launch.device->capability != 90 || (args.head_dim != 64 && args.head_dim != 128)) {
    return false;
  }
  HopperArgs hopper;
  hopper.prefill = args;
  bool launched = false;
  dispatch_rows(dtype, [&](auto element) {
    using T = decltype(element);
    launched = args.head_dim == 64 ? launch_hopper<T, 64>(hopper, dtype, launch)
                                   : launch_hopper<T, 128>(hopper, dtype, launch);
  });
  return launched;
}

}  // namespace sluice::cuda
