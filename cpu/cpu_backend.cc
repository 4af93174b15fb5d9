#include "cpu/cpu_backend.h"

#include <algorithm>
#include <string>

#include "cpu/attention/attention.h"
#include "cpu/cpu_queue.h"
#include "cpu/runtime/page_digest.h"
#include "cpu/scan/scan.h"
#include "sluice/errors.h"
#include "sluice/topology.h"

namespace sluice::cpu {
namespace {

DType compute_dtype(const CpuOptions& options) {
  if (options.compute == DType::f16) {
    throw Error(ErrorCode::unsupported,
                "the CPU backend computes in bf16 or f32, not f16; choose one of them");
  }
  const bool bf16 = Linear::bf16_is_fast();
  if (options.compute == DType::bf16 && !bf16) {
    throw Error(ErrorCode::unsupported,
                "this processor has no bf16 multiplication (AVX512-BF16); compute in f32");
  }
  const bool lossless = options.weight_dtype == DType::bf16;
  return options.compute.value_or(bf16 && lossless ? DType::bf16 : DType::f32);
}

// Storing weights wider than the checkpoint would only cost memory and reading time.
DType stored_dtype(const CpuOptions& options) {
  const DType compute = compute_dtype(options);
  return compute == DType::f32 ? options.weight_dtype : compute;
}

// Measured with sluice-22m on two cores of an EPYC with AVX-512, dense against value tiles: 2.6
// against 2.9 ms at 4K tokens, 4.4 against 3.9 at 9K, 7.6 against 5.8 at 24K.
constexpr std::uint64_t kDenseBytes = std::uint64_t{4} << 20;

// Memory that a thread touches in its stack, thread-local variables and malloc's arenas. 2,048
// threads that computed a prompt of a few tokens took 28 KiB each.
constexpr std::uint64_t kStackBytes = 48 << 10;

BackendInfo describe(const CpuOptions& options, int threads) {
  const Topology topology = detect_topology();
  BackendInfo info;
  info.name = "cpu";
  info.description = topology.processor + ", " + topology.instruction_sets;
  info.logits = {DType::f32, true, 0, PageDigest::kPageBytes};
  info.attends_host_rows = true;
  info.synchronous = true;
  info.compute_tier = Tier::host;
  info.compute_dtype = compute_dtype(options);
  info.threads = threads;
  info.dense_bytes = kDenseBytes;
  return info;
}

}  // namespace

CpuBackend::CpuBackend(const CpuOptions& options)
    : memory_(options.device_cap, options.host_cap),
      threads_(options.threads),
      info_(describe(options, threads_.count())),
      linear_(threads_, info_.compute_dtype, stored_dtype(options)) {}

// Sums the scratch of different operations, because threads keep them side by side.
std::uint64_t CpuBackend::thread_bytes(const ThreadWork& work) const {
  const int threads = threads_.count();
  std::uint64_t products = 0;
  for (const WeightShape& shape : work.products) {
    products = std::max(products, linear_.scratch_bytes(shape));
  }
  std::uint64_t attention = decode_scratch_bytes(work.shape, threads);
  if (work.chunk > 0) {
    for (const bool is_listed : {false, work.lists_pages}) {
      attention = std::max(attention, attend_scratch_bytes(work.shape, work.chunk, work.context,
                                                           is_listed, threads));
    }
  }
  return static_cast<std::uint64_t>(threads) * kStackBytes + products + attention +
         (work.sums_columns ? column_sums_bytes(work.context, threads) : 0);
}

std::unique_ptr<Weight> CpuBackend::take_weight(const WeightShape& shape) {
  // Charged up front: threads take the memory for widened weights on first use and keep it.
  const std::uint64_t widened = std::max(widened_bytes_, product_bytes(shape));
  account(info().compute_tier).charge(widened - widened_bytes_);
  widened_bytes_ = widened;
  return linear_.make_weight(shape, allocate(info().compute_tier, weight_bytes(shape)));
}

std::unique_ptr<Queue> CpuBackend::make_queue(const QueueOptions& options) {
  if (options.stream != nullptr) {
    throw Error(ErrorCode::usage, "device cpu has no streams (`stream`)");
  }
  return std::make_unique<CpuQueue>(*this);
}

}  // namespace sluice::cpu
