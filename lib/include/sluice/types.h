// Vocabulary shared by every part of Sluice: tiers, pages and the shape of a KV cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "sluice/dtype.h"
#include "sluice/row_format.h"

namespace sluice {

// Where bytes live, from the fastest and smallest to the slowest and largest.
enum class Tier : std::uint8_t { device, host, disk };
std::string_view to_string(Tier tier);

// Tokens per page. A page, 128 consecutive tokens of one (layer, KV head), is the unit of
// allocation, of the key index and of disk I/O; a row (one token) is the unit of transfer.
inline constexpr int kPageTokens = 128;

using TokenId = std::int32_t;

// The shape of the KV cache of one model.
struct KvShape {
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  RowFormat rows = DType::bf16;

  // Query heads that share a KV head (1 = MHA, query_heads = MQA).
  constexpr int group() const { return query_heads / kv_heads; }

  // Bytes from one row to the next, and where V begins in a row.
  constexpr std::size_t row_bytes() const { return rows.bytes(head_dim); }
  constexpr std::size_t value_offset() const { return rows.value_offset(head_dim); }

  // Bytes that one token takes over all layers and KV heads.
  constexpr std::size_t token_bytes() const {
    return row_bytes() * static_cast<std::size_t>(layers) * static_cast<std::size_t>(kv_heads);
  }
};

}  // namespace sluice
