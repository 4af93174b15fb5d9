// The queries, keys and values of a KvCache's callers on their way in, and attention on its way
// out: between arrays of any dtype, strides and memory, and dense f32 where the backend computes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "lib/backend.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/kv_cache.h"

namespace sluice {

class CallerArrays {
 public:
  // For steps of up to `tokens` tokens. `factor` is what queries are multiplied by.
  CallerArrays(Queue& queue, const KvShape& shape, std::int64_t tokens, float factor);

  // Where the backend computes, and in host memory.
  static std::uint64_t compute_bytes(const KvShape& shape, std::int64_t tokens);
  static std::uint64_t host_bytes(const BackendInfo& info, const KvShape& shape,
                                  std::int64_t tokens);

  // Throw Error{usage} or {unsupported} for arrays that cannot be read or written, by name.
  void require(std::string_view name, const KvInput& array, int heads, std::int64_t tokens) const;
  void require(std::string_view name, const KvOutput& array, int heads, std::int64_t tokens) const;

  // What is returned serves until the next call; a query's `out` and `lse` are for write().
  NewRows read_rows(int layer, const KvInput& keys, const KvInput& values, std::int64_t tokens);
  Queries read_queries(int layer, const KvInput& queries, std::int64_t tokens);
  // To `out`, and to `lse` if that is not null.
  void write(const KvOutput& out, float* lse, std::int64_t tokens);

  // Once the queue was waited for: what was read last of a layer, of `tokens` tokens, that is no
  // number or too large in one of them.
  struct Bad {
    const char* what = "";  // "keys", "values" or "queries"
    int kv_head = 0;
  };
  std::optional<Bad> bad_rows(int layer, std::int64_t tokens, std::int64_t token) const;
  std::optional<Bad> bad_queries(int layer, std::int64_t token) const;

 private:
  void read(const KvInput& array, std::int64_t tokens, int heads, float factor, std::int64_t at,
            std::int32_t* bad);
  // Flags of a layer: of its rows, keys and then values, and of its queries.
  std::int32_t* bad_rows_of(int layer) const;
  std::int32_t* bad_queries_of(int layer) const;
  void to_device(const KvOutput& out, float* lse, std::int64_t tokens);
  void to_host(const KvOutput& out, float* lse, std::int64_t tokens);
  void copy(void* to, const void* from, std::size_t bytes);

  Queue* queue_;
  KvShape shape_;
  float factor_;
  Buffer in_;       // [tokens, query_heads, head_dim], or keys and then values
  Buffer out_;      // [tokens, query_heads, head_dim]
  Buffer lse_;      // [tokens, query_heads]
  Buffer host_in_;  // what passes through host memory, if in_ and out_ are not there
  Buffer host_out_;
  std::int64_t tokens_;
  Buffer bad_;  // [layers, tokens, 2 * kv_heads + query_heads], host memory
};

}  // namespace sluice
