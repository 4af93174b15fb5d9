// LogitDigest in the layout of these kernels: a scan of tiles writes it for every whole page. A
// page takes 20 bytes per query head, beside 256 of logits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/backend/index_ops.h"

namespace sluice::cuda {

// Null pointers: no digest.
struct PageDigest {
  // f16 [tokens, kv_heads, pages, group, kBoundsPerPage]: the largest logit of each kBoundTokens
  // consecutive tokens, a sector of select().
  std::uint16_t* maxima = nullptr;
  // [tokens, kv_heads, pages, group]: sum over the page of 2^(x log2(e) - m log2(e)), with m its
  // largest logit; m log2(e) is rounded to f32, x log2(e) is not. 0 if m is -Inf.
  float* sums = nullptr;
  std::int64_t pages = 0;  // per row

  static constexpr std::size_t kPageBytes = kBoundsPerPage * sizeof(std::uint16_t) + sizeof(float);

  // Digest of logits [rows, stride], laid out as LogitFormat::digest_bytes() counts it.
  static std::size_t bytes_of(std::int64_t rows, std::int64_t stride) {
    return static_cast<std::size_t>(rows * LogitDigest::pages_of(stride)) * kPageBytes;
  }
  static PageDigest of(const LogitDigest& digest) {
    if (digest.data == nullptr) return {};
    auto* const maxima = reinterpret_cast<std::uint16_t*>(digest.data);
    auto* const sums =
        reinterpret_cast<float*>(maxima + digest.rows * digest.pages * kBoundsPerPage);
    const std::int64_t first = digest.first * digest.pages;
    return {maxima + first * kBoundsPerPage, sums + first, digest.pages};
  }
};

}  // namespace sluice::cuda
