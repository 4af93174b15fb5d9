// Which pages of a head are read: the heaviest that carry the share. Every block that reads some of
// them finds all by itself, which takes less time than another kernel. Sums over the block are of
// integers, whatever order they come in.
#pragma once

#include <cstdint>

#include "kernels/runtime/device_math.cuh"
#include "kernels/values/call.cuh"

namespace sluice::cuda {

inline constexpr int kReadThreads = 256;
inline constexpr int kReadWarps = kReadThreads / kWarp;

// Weights fall into classes of equal sign, exponent and 7 bits. Counted by how far they lie below
// the heaviest: first 16 at a time, down to where a weight is nothing beside it, then singly.
class PageChoice {
  static constexpr int kFine = 16;
  static constexpr float kUnits = 0x1p30f;  // of all pages' weight

 public:
  using Page = std::uint16_t;  // in a list
  static constexpr std::int64_t kMostPages = std::int64_t{1} << 16;

  // What a block keeps in shared memory.
  struct Shared {
    std::uint32_t coarse[kReadThreads];
    std::uint32_t fine[kFine];
    std::uint32_t part[kWarp];
    float sums[kReadWarps];
    std::uint32_t tops[kReadWarps];
    std::uint32_t coarse_bin;
    std::uint32_t missing;  // of the target, without all heavier bins
    std::uint32_t lightest;
    int counts[kReadWarps];
  };

  // By all threads of a block.
  __device__ PageChoice(const float* weights, int pages, Shared& shared)
      : weights_(weights), pages_(pages), shared_(shared) {}

  // Lists the pages that carry `share`, in order; returns how many. The list can be read after the
  // next barrier.
  __device__ int list(float share, Page* to) {
    const std::uint32_t lightest = share < 1.0f ? lightest_class(share) : 0;
    // A warp has neighbouring pages.
    const int each = (pages_ + kReadThreads - 1) / kReadThreads * kWarp;
    const int first = warp() * each;
    const int last = min(first + each, pages_);
    int own = 0;
    for (int at = first; at < last; at += kWarp) own += __popc(chosen(at, last, lightest));
    if (lane() == 0) shared_.counts[warp()] = own;
    __syncthreads();
    int slot = 0;
    int all = 0;
#pragma unroll
    for (int w = 0; w < kReadWarps; ++w) {
      if (w == warp()) slot = all;
      all += shared_.counts[w];
    }
    for (int at = first; at < last; at += kWarp) {
      const std::uint32_t bits = chosen(at, last, lightest);
      const bool is_chosen = (bits >> lane() & 1u) != 0;
      if (is_chosen)
        to[slot + __popc(bits & ((1u << lane()) - 1))] = static_cast<Page>(at + lane());
      slot += __popc(bits);
    }
    return all;
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kWarp; }
  __device__ static std::uint32_t class_of(float weight) { return __float_as_uint(weight) >> 16; }

  // Of the pages from `at` on, a bit for each that is read.
  __device__ std::uint32_t chosen(int at, int last, std::uint32_t lightest) const {
    const int page = at + lane();
    return __ballot_sync(kAllLanes, page < last && class_of(weights_[page]) >= lightest);
  }

  template <typename Body>
  __device__ void for_own(const Body& body) const {
#pragma unroll 4
    for (int page = static_cast<int>(threadIdx.x); page < pages_; page += kReadThreads) {
      body(weights_[page]);
    }
  }

  // The sum of all weights, the same every time, and the heaviest one's class.
  __device__ float weigh(std::uint32_t& top) {
    float sum = 0.0f;
    top = 0;
    for_own([&](float weight) {
      sum += weight;
      top = max(top, class_of(weight));
    });
    sum = warp_sum(sum);
    top = __reduce_max_sync(kAllLanes, top);
    if (lane() == 0) {
      shared_.sums[warp()] = sum;
      shared_.tops[warp()] = top;
    }
    __syncthreads();
    sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kReadWarps; ++w) {
      sum += shared_.sums[w];
      top = max(top, shared_.tops[w]);
    }
    return sum;
  }

  // From this class on pages carry the share, and without it they do not.
  __device__ std::uint32_t lightest_class(float share) {
    const auto thread = threadIdx.x;
    shared_.coarse[thread] = 0;
    if (thread < kFine) shared_.fine[thread] = 0;
    if (thread == 0) shared_.lightest = ~0u;
    std::uint32_t top;
    const float total = weigh(top);
    const float scale = total > 0.0f ? kUnits / total : 0.0f;
    const auto units = [&](float weight) { return static_cast<std::uint32_t>(weight * scale); };
    const auto coarse_of = [&](float weight) {
      return min((top - class_of(weight)) / kFine, static_cast<std::uint32_t>(kReadThreads - 1));
    };
    for_own([&](float weight) { atomicAdd(&shared_.coarse[coarse_of(weight)], units(weight)); });
    __syncthreads();
    std::uint32_t all;
    const std::uint32_t own = shared_.coarse[thread];
    const std::uint32_t before = block_exclusive(own, shared_.part, all);
    const auto target = static_cast<std::uint32_t>(ceilf(static_cast<float>(all) * share));
    if (before < target && before + own >= target) {
      shared_.coarse_bin = thread;
      shared_.missing = target - before;
    }
    __syncthreads();
    if (target == 0) return shared_.lightest;
    const std::uint32_t bin = shared_.coarse_bin;
    for_own([&](float weight) {
      if (coarse_of(weight) != bin) return;
      atomicAdd(&shared_.fine[(top - class_of(weight)) % kFine], units(weight));
    });
    __syncthreads();
    if (thread < kWarp) {
      const std::uint32_t part = lane() < kFine ? shared_.fine[lane()] : 0;
      const bool reaches = warp_inclusive(part) >= shared_.missing;
      const std::uint32_t reached = __ballot_sync(kAllLanes, reaches);
      if (lane() == 0) {
        shared_.lightest = top - (bin * kFine + static_cast<std::uint32_t>(__ffs(reached)) - 1);
      }
    }
    __syncthreads();
    return shared_.lightest;
  }

  const float* weights_;
  int pages_;
  Shared& shared_;
};

}  // namespace sluice::cuda
