// Digests of logits made without a scan, for CPU code that reads digests.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cpu/runtime/page_digest.h"
#include "cpu/runtime/softmax.h"

namespace sluice::testing {

// Leaves logits in host memory as the CPU's scans do, and returns their digest.
inline std::vector<std::byte> digest_pages(const KvShape& shape, const TokenBatch& batch,
                                           LogitView& logits) {
  const std::int64_t rows = batch.count * shape.query_heads;
  const LogitFormat format = {DType::f32, true, 0, cpu::PageDigest::kPageBytes};
  std::vector<std::byte> bytes(format.digest_bytes(rows, logits.stride), std::byte{0xff});
  logits.digest = LogitDigest::in(bytes.data(), rows, logits.stride);
  const cpu::PageDigest digest = cpu::PageDigest::of(logits.digest, 0);
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t page = 0; page < batch.tokens[row / shape.query_heads].pages(); ++page) {
      float* const x = logits.floats() + row * logits.stride + page * kPageTokens;
      const cpu::PageSum noted = cpu::exp_page(x);
      digest.levels_of(row)[page] = noted.level;
      digest.sums_of(row)[page] = noted.sum;
    }
  }
  return bytes;
}

// Turns levels into weights as select() does, given the log-sum-exp of every row.
inline void weigh_levels(const KvShape& shape, const TokenBatch& batch, const LogitView& logits,
                         const float* lse) {
  const cpu::PageDigest digest = cpu::PageDigest::of(logits.digest, 0);
  for (std::int64_t row = 0; row < batch.count * shape.query_heads; ++row) {
    for (std::int64_t page = 0; page < batch.tokens[row / shape.query_heads].pages(); ++page) {
      float& level = digest.levels_of(row)[page];
      level = std::exp(level - lse[row]);
    }
  }
}

}  // namespace sluice::testing
