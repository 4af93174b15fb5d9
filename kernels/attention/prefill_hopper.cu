#include <algorithm>

#include "kernels/attention/prefill_hopper.cuh"
#include "kernels/runtime/dispatch.h"
#include "kernels/runtime/error.h"

namespace sluice::cuda {
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
  if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<EncodeTiled>(function);
}

// Encodes rows as [heads, count, 2 * head_dim] in boxes of kKeys rows; false if the copy engine
// does not support the shape.
template <int kHeadDim>
bool encode(EncodeTiled encoder, CUtensorMap& map, DType dtype, const std::byte* rows,
            std::int64_t count, int row_bytes, int heads, std::int64_t head_stride) {
  using Shape = HopperShape<kHeadDim>;
  if (heads == 1) head_stride = count * row_bytes;
  if (head_stride <= 0 || head_stride % 16 != 0) return false;
  const cuuint64_t sizes[] = {2 * kHeadDim, static_cast<cuuint64_t>(count),
                              static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes),
                                static_cast<cuuint64_t>(head_stride)};
  const cuuint32_t box[] = {Shape::kBoxChannels, Shape::kKeys, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  return encoder(&map,
                 dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                      : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                 3, const_cast<std::byte*>(rows), sizes, strides, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

template <int kHeadDim>
bool encode_all(HopperArgs& args, DType dtype) {
  static const EncodeTiled encoder = find_encoder();
  if (encoder == nullptr) return false;
  const PrefillArgs& prefill = args.prefill;
  const HeadRows& rows = prefill.rows;
  const HeadCounts& counts = prefill.counts;
  args.map_per_head = rows.is_listed || counts.is_listed;
  if (!args.map_per_head) {
    return counts.uniform == 0 ||
           encode<kHeadDim>(encoder, args.maps[0], dtype, rows.base, counts.uniform,
                            prefill.row_bytes, prefill.kv_heads, rows.stride);
  }
  if (prefill.kv_heads > HeadRows::kListed) return false;
  for (int head = 0; head < prefill.kv_heads; ++head) {
    if (counts[head] == 0) continue;  // never read
    if (!encode<kHeadDim>(encoder, args.maps[head], dtype, rows[head], counts[head],
                          prefill.row_bytes, 1, 0)) {
      return false;
    }
  }
  return true;
}

// Returns true if the program contains the kernel's code: without sm_90a the kernel is empty.
template <typename T, int kHeadDim>
bool kernel_exists() {
  constexpr int kRegistersOfCode = 64;
  static const bool exists = [] {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, prefill_hopper<T, kHeadDim>);
    if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
    return status == cudaSuccess && attributes.numRegs > kRegistersOfCode;
  }();
  return exists;
}

template <typename T, int kHeadDim>
bool launch_hopper(HopperArgs& args, DType dtype, const Launch& launch) {
  using Shape = HopperShape<kHeadDim>;
  const auto kernel = prefill_hopper<T, kHeadDim>;
  if (Shape::kBytes > launch.device->shared_bytes || !kernel_exists<T, kHeadDim>() ||
      !encode_all<kHeadDim>(args, dtype)) {
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
