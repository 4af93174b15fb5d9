// Chooses the pages of a head to read: the heaviest that carry the share. Every block that reads
// some of them finds all of them itself, because another kernel would take longer. Sums over the
// block are of integers, so their order does not matter.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/runtime/device_math.cuh"
#include "kernels/values/call.cuh"

namespace sluice::cuda {

inline constexpr int kReadThreads = 256;
inline constexpr int kReadWarps = kReadThreads / kWarp;

// Counts in shared memory. Neighbouring lanes have separate copies, because lanes that count the
// same bin would wait for each other.
template <int kBins>
class Counts {
  static constexpr int kCopies = 4;
  static constexpr int kStride = kBins + 1;  // puts copies into different banks

 public:
  __device__ __forceinline__ void clear(int thread, int threads) {
    for (int i = thread; i < kCopies * kStride; i += threads) counts_[i] = 0;
  }
  __device__ __forceinline__ void add(std::uint32_t bin, std::uint32_t count) {
    atomicAdd(&counts_[threadIdx.x % kCopies * kStride + bin], count);
  }
  __device__ __forceinline__ std::uint32_t of(int bin) const {
    std::uint32_t sum = 0;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) sum += counts_[copy * kStride + bin];
    return sum;
  }

 private:
  std::uint32_t counts_[kCopies * kStride];
};

// A class is the weights with the same bf16 after truncation, 128 to an octave. Pages are summed in
// bins of 16 classes below the heaviest, down to weights that are negligible beside it; then the
// classes of the bin where the sum reaches the share, one by one.
class PageChoice {
  static constexpr int kFine = 16;
  static constexpr float kUnits = 0x1p30f;  // integer units of all pages' weight
  static constexpr int kKept = 4;           // pages whose weights a thread keeps in registers

 public:
  using Page = std::uint16_t;  // in a list
  static_assert(kMostTilePages - 1 <= std::numeric_limits<Page>::max());

  // A block's shared memory.
  struct Shared {
    Counts<kReadThreads> coarse;
    Counts<kFine> fine;
    std::uint32_t part[kWarp];
    float sums[kReadWarps];
    std::uint32_t tops[kReadWarps];
    std::uint32_t coarse_bin;
    std::uint32_t missing;  // units of the target that all heavier bins lack
    std::uint32_t lightest;
    int counts[kReadWarps];
  };

  // All threads of a block construct it. `staged`: room for all weights in shared memory, or null.
  // Weights that threads do not keep are staged there, each at its page's index.
  __device__ PageChoice(const float* weights, int pages, float* staged, Shared& shared)
      : weights_(weights), pages_(pages), shared_(shared) {
    // Bypasses the L1 cache, which may hold stale data of the layer before.
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      if (page_of(i) < pages) kept_[i] = __ldcg(weights + page_of(i));
    }
    if (staged == nullptr) return;
#pragma unroll 8
    for (int page = page_of(kKept); page < pages; page += kReadThreads) {
      staged[page] = __ldcg(weights + page);
    }
    weights_ = staged;
  }

  // Chooses the pages that carry `share`; returns how many.
  __device__ int choose(float share) {
    is_all_ = !(share < 1.0f);
    if (is_all_) return pages_;
    lightest_ = lightest_class(share);
    int own = 0;
    for_pages([&](int page, float weight) { own += __popc(chosen(page, weight)); });
    if (lane() == 0) shared_.counts[warp()] = own;
    __syncthreads();
    int all = 0;
#pragma unroll
    for (int w = 0; w < kReadWarps; ++w) {
      if (w == warp()) before_ = all;
      all += shared_.counts[w];
    }
    return all;
  }

  // Lists the chosen pages, always in the same order; writes entry i only if `is_own(i)`. The list
  // can be read after the next barrier.
  template <typename IsOwn>
  __device__ void list(Page* to, const IsOwn& is_own) const {
    const auto put = [&](int entry, int page) {
      if (is_own(entry)) to[entry] = static_cast<Page>(page);
    };
    if (is_all_) {
#pragma unroll 1
      for (int page = thread(); page < pages_; page += kReadThreads) put(page, page);
      return;
    }
    int entry = before_;
    for_pages([&](int page, float weight) {
      const std::uint32_t bits = chosen(page, weight);
      if ((bits >> lane() & 1u) != 0) put(entry + __popc(bits & ((1u << lane()) - 1)), page);
      entry += __popc(bits);
    });
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % kWarp; }
  __device__ static int warp() { return thread() / kWarp; }
  __device__ static int page_of(int i) { return i * kReadThreads + thread(); }
  __device__ static std::uint32_t class_of(float weight) { return __float_as_uint(weight) >> 16; }

  // One bit for each of the warp's pages, set if it is read.
  __device__ std::uint32_t chosen(int page, float weight) const {
    return __ballot_sync(kAllLanes, page < pages_ && class_of(weight) >= lightest_);
  }

  // Calls body(page, weight) for a thread's pages; warps stay together, so pages past the last one
  // come with a weight of 0.
  template <typename Body>
  __device__ __forceinline__ void for_pages(const Body& body) const {
#pragma unroll
    for (int i = 0; i < kKept; ++i) body(page_of(i), kept_[i]);
#pragma unroll 4
    for (int first = kKept * kReadThreads; first < pages_; first += kReadThreads) {
      const int page = first + thread();
      body(page, page < pages_ ? weights_[page] : 0.0f);
    }
  }

  // Returns the sum of all weights, in a fixed order; `top` is the heaviest weight's class.
  __device__ float weigh(std::uint32_t& top) {
    float sum = 0.0f;
    top = 0;
    for_pages([&](int, float weight) {
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

  // The lightest class that is needed: pages of this class and heavier carry the share, heavier
  // ones alone do not.
  __device__ std::uint32_t lightest_class(float share) {
    shared_.coarse.clear(thread(), kReadThreads);
    shared_.fine.clear(thread(), kReadThreads);
    if (thread() == 0) shared_.lightest = ~0u;
    std::uint32_t top;
    const float total = weigh(top);
    const float scale = total > 0.0f ? kUnits / total : 0.0f;
    const auto units = [&](float weight) { return static_cast<std::uint32_t>(weight * scale); };
    const auto coarse_of = [&](float weight) {
      return min((top - class_of(weight)) / kFine, static_cast<std::uint32_t>(kReadThreads - 1));
    };
    for_pages([&](int, float weight) {
      if (weight > 0.0f) shared_.coarse.add(coarse_of(weight), units(weight));
    });
    __syncthreads();
    std::uint32_t all;
    const std::uint32_t own = shared_.coarse.of(thread());
    const std::uint32_t before = block_exclusive(own, shared_.part, all);
    const auto target = static_cast<std::uint32_t>(ceilf(static_cast<float>(all) * share));
    if (before < target && before + own >= target) {
      shared_.coarse_bin = static_cast<std::uint32_t>(thread());
      shared_.missing = target - before;
    }
    __syncthreads();
    if (target == 0) return shared_.lightest;
    const std::uint32_t bin = shared_.coarse_bin;
    for_pages([&](int, float weight) {
      if (!(weight > 0.0f) || coarse_of(weight) != bin) return;
      shared_.fine.add((top - class_of(weight)) % kFine, units(weight));
    });
    __syncthreads();
    if (warp() == 0) {
      const std::uint32_t part = lane() < kFine ? shared_.fine.of(lane()) : 0;
      const bool reaches = warp_inclusive(part) >= shared_.missing;
      const std::uint32_t reached = __ballot_sync(kAllLanes, reaches);
      if (lane() == 0) {
        shared_.lightest = top - (bin * kFine + static_cast<std::uint32_t>(__ffs(reached)) - 1);
      }
    }
    __syncthreads();
    return shared_.lightest;
  }

  const float* weights_;  // of pages that threads do not keep
  int pages_;
  Shared& shared_;
  float kept_[kKept] = {};
  bool is_all_ = false;
  std::uint32_t lightest_ = 0;  // class of the lightest chosen page
  int before_ = 0;              // chosen pages of the warps before this one
};

}  // namespace sluice::cuda
