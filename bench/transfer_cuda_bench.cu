// Rows from pinned host memory: large copies, and sorted rows gathered by a kernel.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "bench/cuda_support.cuh"
#include "kernels/runtime/copy.h"

namespace sluice::cuda::bench {
namespace {

// Pinned memory in huge pages, touched by several threads: seconds faster than cudaHostAlloc.
class HostRows {
 public:
  explicit HostRows(std::size_t bytes) : bytes_(bytes) {
    data_ = static_cast<std::byte*>(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    ::madvise(data_, bytes, MADV_HUGEPAGE);
    std::vector<std::thread> threads;
    constexpr std::size_t kThreads = 16;
    for (std::size_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([this, t] {
        const std::size_t part = bytes_ / kThreads;
        std::memset(data_ + t * part, static_cast<int>(t + 1), part);
      });
    }
    for (std::thread& thread : threads) thread.join();
    require(cudaHostRegister(data_, bytes, cudaHostRegisterMapped), "pinning");
  }
  HostRows(const HostRows&) = delete;
  HostRows& operator=(const HostRows&) = delete;
  ~HostRows() {
    static_cast<void>(cudaHostUnregister(data_));
    ::munmap(data_, bytes_);
  }

  std::byte* data() const { return data_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

// Allocated once per run, because pinning takes longer than measuring.
HostRows& host_rows() {
  static HostRows rows(std::size_t{16} << 30);
  return rows;
}

// Argument: bytes of one cudaMemcpyAsync.
void copy_to_device(benchmark::State& state) {
  const auto bytes = static_cast<std::size_t>(state.range(0));
  const std::size_t total = std::max(bytes, std::size_t{64} << 20);
  Workspace workspace(1 << 20);
  const DeviceBlock to = make_device_block(total);
  Replay replay(workspace.launch().stream, [&] {
    for (std::size_t at = 0; at < total; at += bytes) {
      require(cudaMemcpyAsync(static_cast<std::byte*>(to.get()) + at, host_rows().data() + at,
                              bytes, cudaMemcpyHostToDevice, workspace.launch().stream),
              "a copy");
    }
  });
  time_replay(state, replay, 1);
  count_rate(state, "bytes/s", static_cast<double>(total));
}

BENCHMARK(copy_to_device)
    ->ArgNames({"bytes"})
    ->Arg(std::int64_t{256} << 20)
    ->Arg(2 << 20)
    ->Arg(512 << 10)
    ->Arg(64 << 10)
    ->UseManualTime()
    ->MinTime(0.05)
    ->Unit(benchmark::kMicrosecond);

// Arguments: rows of each of eight heads, bytes of a row, bytes of the range they lie in, blocks of
// the kernel, sorted.
void gather_rows(benchmark::State& state) {
  const std::int64_t row_bytes = state.range(1);
  const std::int64_t span = state.range(2);
  constexpr int kHeads = 8;
  const std::int64_t rows = state.range(0);
  const std::int64_t slots = span / kHeads / row_bytes / kPageTokens;
  std::mt19937_64 random(7);
  std::vector<std::int32_t> positions;
  for (std::int64_t i = 0; i < rows; ++i) {
    positions.push_back(
        static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(slots * kPageTokens)));
  }
  if (state.range(4) != 0) std::sort(positions.begin(), positions.end());
  std::vector<PageSlots> pages;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    pages.push_back({PageSlots::kNone, static_cast<std::int32_t>(slot)});
  }
  Workspace workspace(1 << 20);
  const DeviceBlock device_positions = device_copy(positions);
  const DeviceBlock device_pages = device_copy(pages);
  const DeviceBlock to = make_device_block(static_cast<std::size_t>(kHeads * rows * row_bytes));
  GatherParams p;
  p.shape = {1, kHeads, kHeads, static_cast<int>(row_bytes / 4), DType::bf16};
  p.rows.host = host_rows().data();
  p.rows.host_stride = span / kHeads;
  p.rows.pages = static_cast<const PageSlots*>(device_pages.get());
  p.rows.table_stride = slots;
  p.positions = static_cast<const std::int32_t*>(device_positions.get());
  p.count = rows;
  p.to = static_cast<std::byte*>(to.get());
  p.to_rows = rows;
  const auto blocks = static_cast<int>(state.range(3));
  Replay replay(workspace.launch().stream, [&] { gather(p, workspace.launch(), blocks); });
  time_replay(state, replay, 1);
  count_rate(state, "bytes/s", static_cast<double>(kHeads * rows) * static_cast<double>(row_bytes));
}

BENCHMARK(gather_rows)
    ->ArgNames({"rows", "row_bytes", "span", "blocks", "sorted"})
    ->ArgsProduct({{32768, 131072},
                   {512, 256},
                   {std::int64_t{4} << 30, std::int64_t{16} << 30},
                   {8, 16},
                   {1}})
    ->Args({32768, 512, std::int64_t{16} << 30, 16, 0})
    ->Args({32768, 1024, std::int64_t{16} << 30, 16, 1})
    ->UseManualTime()
    ->MinTime(0.05)
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace sluice::cuda::bench
