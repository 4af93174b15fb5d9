// Vocabulary shared by every part of Sluice: element types, tiers and the shape of a KV cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace sluice {

// Element types that checkpoints, rows and activations may have.
enum class DType : std::uint8_t { f32, f16, bf16 };

constexpr std::size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
std::string_view to_string(DType dtype);

// Where bytes live, from the fastest and smallest to the slowest and largest.
enum class Tier : std::uint8_t { device, host, disk };
std::string_view to_string(Tier tier);

// Tokens per page. A page, 128 consecutive tokens of one (layer, KV head), is the unit of
// allocation, of the key index and of disk I/O; a row (one token) is the unit of transfer.
inline constexpr int kPageTokens = 128;

// Rows start on cache-line boundaries: misaligned rows were measured 4-18x slower over PCIe.
inline constexpr std::size_t kRowAlignment = 64;

using TokenId = std::int32_t;

// The shape of the KV cache of one model.
struct KvShape {
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  DType dtype = DType::bf16;

  // Query heads that share a KV head (1 = MHA, query_heads = MQA).
  constexpr int group() const { return query_heads / kv_heads; }

  // Bytes from one row (K then V of a token, 2 * head_dim elements) to the next.
  constexpr std::size_t row_bytes() const {
    const std::size_t payload = 2 * static_cast<std::size_t>(head_dim) * size_of(dtype);
    return (payload + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  }

  // Bytes that one token takes over all layers and KV heads.
  constexpr std::size_t token_bytes() const {
    return row_bytes() * static_cast<std::size_t>(layers) * static_cast<std::size_t>(kv_heads);
  }
};

}  // namespace sluice
