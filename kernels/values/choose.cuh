// Chooses the pages of a head to read: the heaviest that carry the share. Every block that reads
// some of them finds the lightest that is read itself, because another kernel would take longer,
// and lists its own pages only. Sums over the block are of integers, so their order does not
// matter.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/runtime/device_math.cuh"
#include "kernels/values/call.cuh"

namespace sluice::cuda {

inline constexpr int kReadThreads = 256;
inline constexpr int kReadWarps = kReadThreads / kWarp;

// A class is the weights with the same bf16 after truncation, 128 to an octave. A bin has the pages
// of one class, counted from the heaviest down to weights that are negligible beside it.
class PageChoice {
  static constexpr int kThreadBins = 16;
  static constexpr float kUnits = 0x1p30f;  // integer units of all pages' weight
  // Weights that a thread keeps in registers: those of a million tokens.
  static constexpr int kGroups = 4;
  static constexpr int kGroupPages = 8;
  static constexpr int kKept = kGroups * kGroupPages;

 public:
  static constexpr int kBins = kThreadBins * kReadThreads;
  static constexpr int kMostListed = 256;  // pages that list() lists at a time
  using Page = std::uint16_t;              // in a list
  static_assert(kMostTilePages - 1 <= std::numeric_limits<Page>::max());

  // A block's shared memory.
  struct Shared {
    std::uint32_t part[kWarp];
    float sums[kReadWarps];
    std::uint32_t tops[kReadWarps];
    int counts[kReadWarps];
    std::uint32_t lightest;
    Page listed[kMostListed];
  };

  // All threads of a block construct it.
  __device__ PageChoice(const float* weights, int pages, Shared& shared)
      : weights_(weights), pages_(pages), shared_(shared) {
    for_groups([&](int i) {
      if (page_of(i) < pages) kept_[i] = weight_of(page_of(i));
    });
  }

  // Chooses the pages that carry `share`; returns how many. `bins`: [kBins] of shared memory, free
  // to use again after the next barrier.
  __device__ int choose(float share, std::uint32_t* bins) {
    if (share < 1.0f) lightest_ = lightest_class(share, bins);
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

  // Lists the first kMostListed chosen pages of a split: every `splits`-th from number `split` on.
  // The list can be read after the next barrier, and is always in the same order.
  __device__ void list(int split, int splits) {
    Numbers numbers(split, splits, 0, before_);
    for_pages([&](int page, float weight) { add(page, weight, numbers); });
  }
  // Lists the kMostListed pages of a later `round`. Reads the weights again, so that no thread
  // keeps them meanwhile.
  __device__ void list_later(int split, int splits, int round) {
    Numbers numbers(split, splits, round, before_);
#pragma unroll 4
    for (int first = 0; first < pages_; first += kReadThreads) {
      const int page = first + thread();
      add(page, page < pages_ ? weight_of(page) : 0.0f, numbers);
    }
  }
  __device__ int listed(int entry) const { return shared_.listed[entry]; }

 private:
  // Numbers of chosen pages, and which of them are listed.
  struct Numbers {
    int split;
    int splits;
    int round;
    int next;     // of the warp's next chosen page
    float share;  // 1 / splits

    __device__ Numbers(int of_split, int of_splits, int of_round, int first)
        : split(of_split),
          splits(of_splits),
          round(of_round),
          next(first),
          share(1.0f / static_cast<float>(of_splits)) {}
  };

  // Lists a thread's page if it is one of those; all lanes call it.
  __device__ __forceinline__ void add(int page, float weight, Numbers& numbers) {
    const std::uint32_t bits = chosen(page, weight);
    const int number = numbers.next + __popc(bits & ((1u << lane()) - 1));
    numbers.next += __popc(bits);
    if ((bits >> lane() & 1u) == 0) return;
    // Exact, because numbers stay below 2^16.
    const auto turn = static_cast<int>((static_cast<float>(number) + 0.5f) * numbers.share);
    if (number - turn * numbers.splits != numbers.split) return;
    if (turn / kMostListed != numbers.round) return;
    shared_.listed[turn % kMostListed] = static_cast<Page>(page);
  }

  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return thread() % kWarp; }
  __device__ static int warp() { return thread() / kWarp; }
  __device__ static int page_of(int i) { return i * kReadThreads + thread(); }
  __device__ static std::uint32_t class_of(float weight) { return __float_as_uint(weight) >> 16; }

  // One bit for each of the warp's pages, set if it is read.
  __device__ std::uint32_t chosen(int page, float weight) const {
    return __ballot_sync(kAllLanes, page < pages_ && class_of(weight) >= lightest_);
  }

  // Bypasses the L1 cache, which may hold stale data of the layer before.
  __device__ float weight_of(int page) const { return __ldcg(weights_ + page); }

  // Calls body(i) for the weights that the thread keeps.
  template <typename Body>
  __device__ __forceinline__ void for_groups(const Body& body) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group * kGroupPages * kReadThreads >= pages_) return;
#pragma unroll
      for (int i = 0; i < kGroupPages; ++i) body(group * kGroupPages + i);
    }
  }

  // Calls body(page, weight) for a thread's pages; warps stay together, so pages past the last one
  // come with a weight of 0.
  template <typename Body>
  __device__ __forceinline__ void for_pages(const Body& body) const {
    for_groups([&](int i) { body(page_of(i), kept_[i]); });
#pragma unroll 4
    for (int first = kKept * kReadThreads; first < pages_; first += kReadThreads) {
      const int page = first + thread();
      body(page, page < pages_ ? weight_of(page) : 0.0f);
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
  __device__ std::uint32_t lightest_class(float share, std::uint32_t* bins) {
    auto* const own = reinterpret_cast<uint4*>(bins) + thread() * (kThreadBins / 4);
#pragma unroll
    for (int i = 0; i < kThreadBins / 4; ++i) own[i] = make_uint4(0, 0, 0, 0);
    if (thread() == 0) shared_.lightest = ~0u;
    std::uint32_t top;
    const float total = weigh(top);  // its barrier comes after the zeros
    const float scale = total > 0.0f ? kUnits / total : 0.0f;
    for_pages([&](int, float weight) {
      if (!(weight > 0.0f)) return;
      const std::uint32_t bin = min(top - class_of(weight), static_cast<std::uint32_t>(kBins - 1));
      atomicAdd(bins + bin, static_cast<std::uint32_t>(weight * scale));
    });
    __syncthreads();
    std::uint32_t units[kThreadBins];
    std::uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < kThreadBins / 4; ++i) {
      const uint4 four = own[i];
      units[4 * i] = four.x;
      units[4 * i + 1] = four.y;
      units[4 * i + 2] = four.z;
      units[4 * i + 3] = four.w;
      sum += four.x + four.y + four.z + four.w;
    }
    std::uint32_t all;
    std::uint32_t before = block_exclusive(sum, shared_.part, all);
    const auto target = static_cast<std::uint32_t>(ceilf(static_cast<float>(all) * share));
    if (before < target && before + sum >= target) {
#pragma unroll
      for (int i = 0; i < kThreadBins; ++i) {
        if (before < target && before + units[i] >= target) {
          shared_.lightest = top - static_cast<std::uint32_t>(thread() * kThreadBins + i);
        }
        before += units[i];
      }
    }
    __syncthreads();
    return shared_.lightest;
  }

  const float* weights_;
  int pages_;
  Shared& shared_;
  float kept_[kKept] = {};
  std::uint32_t lightest_ = 0;  // class of the lightest chosen page
  int before_ = 0;              // chosen pages of the warps before this one
};

}  // namespace sluice::cuda
