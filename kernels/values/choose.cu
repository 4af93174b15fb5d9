// Which pages of a head are read: the heaviest that carry the share. One block per head. A thread
// has neighbouring pages; sums over the block are of integers, whatever order they come in.
#include <cstdint>

#include "kernels/runtime/device_math.cuh"
#include "kernels/runtime/early_launch.cuh"
#include "kernels/values/call.cuh"

namespace sluice::cuda {
namespace {

// Classes of weights, of 16 bits, are found two bits at a time.
constexpr int kRounds = 8;
constexpr int kTries = 3;
constexpr float kUnits = 0x1p30f;  // of all pages' weight

// The pages of a thread.
struct OwnPages {
  const float* weights;  // of its first
  int first;
  int count;
};

__device__ __forceinline__ std::uint32_t class_of(float weight) {
  return __float_as_uint(weight) >> 16;
}

// The sum over all threads, the same every time. `parts` is [kWarp], free to use on entry.
__device__ float block_sum(float x, float* parts) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  x = warp_sum(x);
  if (lane == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  return warp_sum(lane < static_cast<int>(blockDim.x) / kWarp ? parts[lane] : 0.0f);
}

// The lightest class that is read: from it on, pages carry the share, and without it they do not.
__device__ std::uint32_t lightest_class(const OwnPages& own, float share) {
  __shared__ float parts[kWarp];
  __shared__ std::uint32_t sums[kRounds][kTries];
  __shared__ std::uint32_t all;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < kRounds * kTries) (&sums[0][0])[thread] = 0;
  if (thread == 0) all = 0;
  float mass = 0.0f;
  for (int i = 0; i < own.count; ++i) mass += own.weights[i];
  const float total = block_sum(mass, parts);
  const float scale = total > 0.0f ? kUnits / total : 0.0f;
  const auto units = [&](int i) { return static_cast<std::uint32_t>(own.weights[i] * scale); };
  std::uint32_t own_units = 0;
  for (int i = 0; i < own.count; ++i) own_units += units(i);
  own_units = __reduce_add_sync(kAllLanes, own_units);
  if (thread % kWarp == 0) atomicAdd(&all, own_units);
  __syncthreads();
  const auto target = static_cast<std::uint32_t>(ceilf(static_cast<float>(all) * share));
  std::uint32_t lightest = 0;
#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    const int shift = 2 * (kRounds - 1 - round);
    std::uint32_t from[kTries] = {};
    for (int i = 0; i < own.count; ++i) {
      const std::uint32_t own_class = class_of(own.weights[i]);
      const std::uint32_t own_part = units(i);
#pragma unroll
      for (int t = 0; t < kTries; ++t) {
        if (own_class >= lightest + (static_cast<std::uint32_t>(t + 1) << shift)) {
          from[t] += own_part;
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTries; ++t) {
      from[t] = __reduce_add_sync(kAllLanes, from[t]);
      if (thread % kWarp == 0 && from[t] != 0) atomicAdd(&sums[round][t], from[t]);
    }
    __syncthreads();
    std::uint32_t steps = 0;
    while (steps < kTries && sums[round][steps] >= target) ++steps;
    lightest += steps << shift;
  }
  return lightest;
}

// Writes the pages from a class on, in order; returns how many there are.
__device__ std::int32_t write_read(const TilesCall& c, int head, const OwnPages& own,
                                   std::uint32_t lightest) {
  __shared__ std::int32_t parts[kWarp];
  const std::int32_t sequence = c.token_of(head).sequence;
  std::int32_t count = 0;
  for (int i = 0; i < own.count; ++i) count += class_of(own.weights[i]) >= lightest ? 1 : 0;
  std::int32_t total = 0;
  std::int32_t at = block_exclusive(count, parts, total);
  ReadPage* const to = c.read + std::int64_t{head} * c.most_pages;
  for (int i = 0; i < own.count; ++i) {
    if (class_of(own.weights[i]) < lightest) continue;
    const int page = own.first + i;
    to[at++] = {page, static_cast<std::int32_t>(c.values.place_of(sequence, page))};
  }
  return total;
}

// Weight of all pages, by a warp for every query head.
__device__ void add_masses(const TilesCall& c, int head, int pages) {
  const auto lane = static_cast<int>(threadIdx.x) % kWarp;
  const int slices = (pages + c.slice_pages - 1) / c.slice_pages;
  for (int g = static_cast<int>(threadIdx.x) / kWarp; g < c.group;
       g += static_cast<int>(blockDim.x) / kWarp) {
    float sum = 0.0f;
    for (int slice = lane; slice < slices; slice += kWarp) {
      sum += c.slice_masses[(std::int64_t{head} * c.slices + slice) * c.group + g];
    }
    sum = warp_sum(sum);
    if (lane == 0) c.masses[head * c.group + g] = sum;
  }
}

__global__ void __launch_bounds__(kChooseThreads)
    choose_pages(const __grid_constant__ TilesCall c) {
  wait_for_kernel_before();
  allow_next_kernel();
  const auto head = static_cast<int>(blockIdx.x);
  int pages = page_of(c.token_of(head).position);
  if (pages > 0 && c.is_bad[head] != 0) pages = 0;
  add_masses(c, head, pages);
  std::int32_t count = 0;
  if (pages > 0) {
    const int each = (pages + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
    OwnPages own;
    own.first = static_cast<int>(threadIdx.x) * each;
    own.count = min(max(pages - own.first, 0), each);
    own.weights = c.weights + std::int64_t{head} * c.most_pages + own.first;
    const std::uint32_t lightest = c.share < 1.0f ? lightest_class(own, c.share) : 0;
    count = write_read(c, head, own, lightest);
  }
  if (threadIdx.x != 0) return;
  c.read_counts[head] = count;
  if (c.pages_read != nullptr) c.pages_read[head] = count * c.query_parts;
}

}  // namespace

void run_choose(const TilesCall& c, const Launch& launch) {
  int threads = 4 * kWarp;
  while (threads < kChooseThreads && threads < c.most_pages) threads *= 2;
  launch_early("choosing pages of value tiles", choose_pages, dim3(static_cast<unsigned>(c.heads)),
               static_cast<unsigned>(threads), 0, launch, c);
}

}  // namespace sluice::cuda
