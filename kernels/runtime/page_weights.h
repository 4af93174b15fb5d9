// LogitDigest::weights in the layout of these kernels: for attend_tiles(), the summed weight of the
// unselected tokens of every whole page, relative to the log-sum-exp that select() reports. Written
// by select() where it can (leaves_page_weights()), else by weigh_pages() after it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cuda {

// Weights of [heads], each a KV head of one token. Null pointers: no weights.
struct PageWeights {
  uint4* masks = nullptr;    // [heads, pages]: one bit per token, set if it is selected
  float* weights = nullptr;  // [heads, pages]: sum over all query heads
  float* masses = nullptr;   // [heads, slices, group]: sum over kSlicePages pages, per query head
  std::int64_t pages = 0;    // per head, a multiple of kSlicePages
  int group = 0;

  static constexpr int kSlicePages = 64;
  static constexpr int kMostGroup = 64;
  // A mask, a weight and a mass: a slice has a mass per query head, at most one per page.
  static constexpr std::size_t kPageBytes = sizeof(uint4) + 2 * sizeof(float);
  static_assert(LogitDigest::kPageAlignment % kSlicePages == 0);
  static_assert(kMostGroup <= kSlicePages);

  // Slices that `pages` pages take.
  __host__ __device__ static constexpr int slices_of(std::int64_t pages) {
    return static_cast<int>((pages + kSlicePages - 1) / kSlicePages);
  }
  // `data`: `heads * pages * kPageBytes` bytes, aligned to 16.
  static PageWeights in(std::byte* data, std::int64_t heads, std::int64_t pages, int group) {
    PageWeights w;
    w.masks = reinterpret_cast<uint4*>(data);
    w.weights = reinterpret_cast<float*>(w.masks + heads * pages);
    w.masses = w.weights + heads * pages;
    w.pages = pages;
    w.group = group;
    return w;
  }
  static PageWeights of(const LogitDigest& digest, int group) {
    if (digest.weights == nullptr) return {};
    return in(digest.weights, digest.rows / group, digest.pages, group).from(digest.first / group);
  }

  // The weights of heads from `head` on.
  __host__ __device__ PageWeights from(std::int64_t head) const {
    PageWeights w = *this;
    if (masks == nullptr) return w;
    w.masks += head * pages;
    w.weights += head * pages;
    w.masses += head * slices_of(pages) * group;
    return w;
  }
};

}  // namespace sluice::cuda
