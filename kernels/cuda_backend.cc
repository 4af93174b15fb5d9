#include "kernels/cuda_backend.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/cuda_device.h"
#include "kernels/cuda_queue.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/link.h"
#include "kernels/runtime/page_digest.h"
#include "kernels/runtime/page_weights.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/channels.h"
#include "kernels/scan/scan.h"
#include "kernels/select/select.h"
#include "kernels/values/values.h"
#include "lib/check.h"
#include "lib/gpu_sizes.h"
#include "sluice/errors.h"

namespace sluice::cuda {
namespace {

// Query heads of one token: the kernels have this many counters, whatever the group size.
constexpr int kMostHeads = 4096;
static_assert(kMostHeads <= Launch::kHalfCounters);
// Plans made without a GPU count by these numbers.
static_assert(gpu::logit_format().digested_from == kDigestedFrom);
static_assert(gpu::logit_format().digest_page_bytes == PageDigest::kPageBytes);
static_assert(gpu::logit_format().page_weight_bytes == PageWeights::kPageBytes);
static_assert(gpu::logit_format().weighed_from == kWeighedFrom);
static_assert(gpu::logit_format().weighed_to == kDigestedFrom);
static_assert(gpu::logit_format().most_group == kMostGroup);
static_assert(gpu::logit_format().most_tokens == kMostEntries);
static_assert(gpu::logit_format().most_tile_tokens == kMostTilePages * kPageTokens);
static_assert(gpu::kTileOutputs == kTileOutputs && gpu::kTileInputs == kTileInputs);
static_assert(gpu::kInt8TileBytes == CodedTile<WeightCode::int8>::kBytes);
static_assert(gpu::kInt4TileBytes == CodedTile<WeightCode::int4>::kBytes);

int select_device(int ordinal) {
  int count = 0;
  require(cudaGetDeviceCount(&count), "looking for a device (`device` cuda)");
  if (ordinal >= count) {
    throw Error(ErrorCode::unsupported, "`device` cuda:" + std::to_string(ordinal) +
                                            ": this machine has " + std::to_string(count) +
                                            " CUDA device(s)");
  }
  require(cudaSetDevice(ordinal), "selecting the device");
  return ordinal;
}

std::uint64_t cap_of(const CudaOptions& options, const DeviceLimits& limits) {
  if (options.device_cap) return *options.device_cap;
  std::size_t free = 0;
  std::size_t total = 0;
  require(cudaMemGetInfo(&free, &total), "asking for free device memory");
  const std::uint64_t left = std::min<std::uint64_t>(free, limits.memory_bytes);
  return left > gpu::kReserve ? left - gpu::kReserve : 0;
}

// Nominal bandwidth of the device's memory, bytes per second.
double memory_rate(int ordinal) {
  int kilohertz = 0;
  int bits = 0;
  require(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, ordinal), "the memory");
  require(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, ordinal), "the memory");
  return 2.0 * 1e3 * kilohertz * bits / 8.0;
}

BackendInfo describe(const CudaOptions& options, const DeviceLimits& limits) {
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, options.ordinal), "the device's properties");
  BackendInfo info;
  info.name = "cuda:" + std::to_string(options.ordinal);
  info.description = std::string(properties.name) + ", compute capability " +
                     std::to_string(limits.capability / 10) + "." +
                     std::to_string(limits.capability % 10) + ", " +
                     std::to_string(limits.multiprocessors) + " multiprocessors";
  info.compute_tier = Tier::device;
  info.codes_weights = true;
  info.compute_dtype = options.compute.value_or(options.weight_dtype);
  info.logits = gpu::logit_format();
  info.most_query_heads = kMostHeads;
  info.reads = {kTilePages, kMaxQueries, kBunch};
  info.processor = Processor::cuda;
  info.head_dims.assign(gpu::kHeadDims.begin(), gpu::kHeadDims.end());
  info.f32_rows = false;
  info.row_codes.assign(gpu::kRowCodes.begin(), gpu::kRowCodes.end());
  info.windows = false;
  info.memory_bytes = limits.memory_bytes;
  info.memory_rate = memory_rate(options.ordinal);
  info.link = measure_link();
  if (limits.bus_rate > 0) {
    info.link.read = std::min(info.link.read, static_cast<double>(limits.bus_rate));
  }
  info.cached_bytes = gpu::cached_bytes(info.link.read);
  info.branch_bytes = gpu::kBranchDeviceBytes;
  info.dense_bytes = gpu::dense_bytes(info.memory_rate);
  return info;
}

}  // namespace

CudaBackend::CudaBackend(const CudaOptions& options)
    : ordinal_(select_device(options.ordinal)),
      limits_(current_limits()),
      stream_(make_stream()),
      memory_(ordinal_, cap_of(options, limits_), options.host_cap, stream_.get()),
      info_(describe(options, limits_)) {}

// Destructors wait for this device, whatever device the thread used before.
CudaBackend::~CudaBackend() {
  ignore(cudaSetDevice(ordinal_));
  ignore(cudaDeviceSynchronize());
}

void CudaBackend::unregister_host(std::byte* data) noexcept {
  ignore(cudaSetDevice(ordinal_));
  memory_.unregister_host(data);
}

void CudaBackend::use_device() const { require(cudaSetDevice(ordinal_), "selecting the device"); }

void CudaBackend::register_host(std::byte* data, std::size_t bytes) {
  use_device();
  memory_.register_host(data, bytes);
}

std::byte* CudaBackend::take(Tier tier, std::size_t bytes) {
  check(recording == 0, "memory taken by work that is recorded");
  use_device();
  return memory_.take(tier, bytes);
}

void CudaBackend::give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept {
  check(recording == 0, "memory given back by work that is recorded");
  ignore(cudaSetDevice(ordinal_));
  memory_.give_back(tier, data, bytes);
}

std::uint64_t CudaBackend::weight_bytes(const WeightShape& shape) const {
  return gpu::weight_bytes(shape);
}

std::unique_ptr<Weight> CudaBackend::take_weight(const WeightShape& shape) {
  return std::make_unique<CudaWeight>(allocate(Tier::device, weight_bytes(shape)), shape);
}

template <class Part>
void CudaBackend::for_parts(CopyOp op, const Part& part) const {
  const auto within = [&](const std::byte* data, std::size_t bytes) {
    const std::size_t reached = memory_.host().reach(data, bytes);
    return reached > 0 ? reached : bytes;
  };
  while (op.bytes > 0) {
    const std::size_t bytes = std::min(within(op.to, op.bytes), within(op.from, op.bytes));
    part(CopyOp{op.to, op.from, bytes});
    op.to += bytes;
    op.from += bytes;
    op.bytes -= bytes;
  }
}

void CudaBackend::copy_large(const CopyOp& op, cudaStream_t stream) const {
  for_parts(op, [&](const CopyOp& part) {
    require(cudaMemcpyAsync(part.to, part.from, part.bytes, cudaMemcpyDefault, stream), "a copy");
  });
}

void CudaBackend::copy_batched(std::span<const CopyOp> ops, cudaStream_t stream) const {
#if CUDART_VERSION >= 13000
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<std::size_t> bytes;
  for (const CopyOp& op : ops) {
    for_parts(op, [&](const CopyOp& part) {
      to.push_back(part.to);
      from.push_back(part.from);
      bytes.push_back(part.bytes);
    });
  }
  if (to.empty()) return;
  cudaMemcpyAttributes in_order = {};
  in_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first = 0;
  require(cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), to.size(), &in_order, &first,
                               1, stream),
          "a batch of copies");
#else
  static_cast<void>(ops);
  static_cast<void>(stream);
  throw Error(ErrorCode::unsupported, "batched copies need a program built with CUDA 13");
#endif
}

void CudaBackend::require_usable(cudaStream_t stream) const {
  const auto refuse = [](const std::string& why) {
    throw Error(ErrorCode::usage, "`stream` " + why);
  };
  if (stream == cudaStreamPerThread) refuse("is another one in every thread; make one");
  int of = 0;
  require(cudaStreamGetDevice(stream, &of), "a stream");
  if (of != ordinal_) refuse("is of device cuda:" + std::to_string(of) + ", not of " + info_.name);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  require(cudaStreamIsCapturing(stream, &status), "a stream");
  if (status != cudaStreamCaptureStatusNone) refuse("is being captured");
}

std::unique_ptr<Queue> CudaBackend::make_queue(const QueueOptions& options) {
  use_device();
  if (options.stream != nullptr) require_usable(static_cast<cudaStream_t>(options.stream));
  return std::make_unique<CudaQueue>(*this, options);
}

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  return std::make_unique<CudaBackend>(options);
}

}  // namespace sluice::cuda
