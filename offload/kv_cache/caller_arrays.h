// Copies between the arrays of a KvCache's callers, of any dtype, strides and memory, and dense f32
// where the backend computes: queries, keys and values on their way in, attention on its way out.
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
  // For steps of up to `tokens` tokens. Queries are multiplied by `factor`.
  CallerArrays(Queue& queue, const KvShape& shape, std::int64_t tokens, float factor);

  // Bytes allocated where the backend computes, and in host memory.
  static std::uint64_t compute_bytes(const KvShape& shape, std::int64_t tokens);
  static std::uint64_t host_bytes(const BackendInfo& info, const KvShape& shape,
                                  std::int64_t tokens);

  // Throw Error{usage} or {unsupported} for arrays that cannot be read or written, by name.
  void require(std::string_view name, const KvInput& array, int heads, std::int64_t tokens) const;
  void require(std::string_view name, const KvOutput& array, int heads, std::int64_t tokens) const;

  // The returned pointers are valid until the next call; `out` and `lse` of queries are for
  // write().
  NewRows read_rows(int layer, const KvInput& keys, const KvInput& values, std::int64_t tokens);
  Queries read_queries(int layer, const KvInput& queries, std::int64_t tokens);
  // Copies attention to `out`, and to `lse` if that is not null.
  void write(const KvOutput& out, float* lse, std::int64_t tokens);

  // The first array of a layer's latest read, of `tokens` tokens, with a NaN, an Inf or too large a
  // value in `token`. Call after waiting for the queue.
  struct Bad {
    const char* what = "";  // "keys", "values" or "queries"
    int kv_head = 0;
  };
  std::optional<Bad> bad_rows(int layer, std::int64_t tokens, std::int64_t token) const;
  std::optional<Bad> bad_queries(int layer, std::int64_t token) const;

 private:
  void read(const KvInput& array, std::int64_t tokens, int heads, float factor, std::int64_t at,
            std::int32_t* bad);
  // Flags of a layer: of its rows (keys, then values), and of its queries.
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
  Buffer host_in_;  // staging in host memory, if in_ and out_ are elsewhere
  Buffer host_out_;
  std::int64_t tokens_;
  Buffer bad_;  // [layers, tokens, 2 * kv_heads + query_heads], host memory
};

}  // namespace sluice
