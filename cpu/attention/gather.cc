#include <algorithm>
#include <cstddef>
#include <cstring>

#include "cpu/attention/attention.h"
#include "cpu/attention/prefetch.h"

namespace sluice::cpu {

void gather(const GatherParams& p, Threads& threads) {
  const std::size_t row_bytes = p.shape.row_bytes();
  threads.for_each(p.shape.kv_heads, [&](std::int64_t head) {
    std::byte* to = p.to + static_cast<std::size_t>(head * p.to_rows) * row_bytes;
    for_rows(
        static_cast<std::size_t>(p.count), row_bytes,
        [&](std::size_t i) {
          return p.rows.row(p.sequence, head, p.positions[i], static_cast<std::int64_t>(row_bytes));
        },
        [&](std::size_t i, const std::byte* row) {
          std::memcpy(to + i * row_bytes, row, row_bytes);
        });
  });
}

void pack_tokens(const PackTokensParams& p, Threads& threads) {
  threads.for_each(p.count, [&](std::int64_t i) {
    std::copy_n(p.piece + (p.positions[i] - p.first) * p.stride, p.width, p.packed + i * p.width);
  });
}

void unpack_tokens(const UnpackTokensParams& p, Threads& threads) {
  if (p.clear) std::fill_n(p.piece, p.tokens * p.width, 0.0f);
  threads.for_each(p.count, [&](std::int64_t i) {
    std::copy_n(p.packed + i * p.width, p.width, p.piece + (p.positions[i] - p.first) * p.width);
  });
}

}  // namespace sluice::cpu
