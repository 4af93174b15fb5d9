// Queries, keys and values that `sluice bench` replays without a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "sluice/types.h"

namespace sluice::tools {

enum class RowPart : std::uint8_t { q, k, v };

// The rows of one sequence, after RoPE: keys and values of its tokens, and queries of its newest
// tokens, the steps.
class BenchRows {
 public:
  BenchRows() = default;
  BenchRows(const BenchRows&) = delete;
  BenchRows& operator=(const BenchRows&) = delete;
  virtual ~BenchRows() = default;

  // Layers, heads and head_dim; the row format does not count.
  virtual KvShape shape() const = 0;
  virtual DType dtype(RowPart part) const = 0;
  // Fills `to` with the part of one layer, [count, heads, head_dim]: of the tokens [first, first +
  // count), or for q of these steps. Throws what reading a file throws.
  virtual void read(RowPart part, int layer, std::int64_t first, std::int64_t count,
                    std::span<std::byte> to) const = 0;

  // Bytes of one token, or step, in one layer.
  std::size_t token_bytes(RowPart part) const {
    const KvShape of = shape();
    const int heads = part == RowPart::q ? of.query_heads : of.kv_heads;
    return static_cast<std::size_t>(heads) * static_cast<std::size_t>(of.head_dim) *
           size_of(dtype(part));
  }
};

}  // namespace sluice::tools
