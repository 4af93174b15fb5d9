// Random attention problems, and runs of them on a backend.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "lib/backend/kv_ops.h"
#include "lib/backend/memory.h"
#include "tests/support/attention_oracle.h"
#include "tests/support/device.h"
#include "tests/support/random.h"

namespace sluice::testing {

// Standard normal queries, keys and values; `count` rows for each KV head.
inline AttentionCase random_case(Random& random, const KvShape& shape, std::int64_t tokens,
                                 std::int64_t count) {
  AttentionCase c;
  c.shape = shape;
  c.tokens = tokens;
  c.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  c.q = random.normal(tokens * shape.query_heads * shape.head_dim);
  for (int head = 0; head < shape.kv_heads; ++head) {
    c.rows.emplace_back(static_cast<std::size_t>(count) * shape.row_bytes());
    const std::vector<float> values = random.normal(count * 2 * shape.head_dim);
    for (std::int64_t row = 0; row < count; ++row) {
      const float* const key = values.data() + 2 * row * shape.head_dim;
      set_row(c, head, row, key, key + shape.head_dim);
    }
  }
  return c;
}

// A range of rows of every KV head: [begin, end), clipped to their count.
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = std::numeric_limits<std::int64_t>::max();
};

struct Partial {
  std::vector<float> out;  // [tokens, query_heads, head_dim]
  std::vector<float> lse;  // [tokens, query_heads]
};

// Copies a case to a backend's memory once and attends over parts of it.
class AttentionRun {
 public:
  AttentionRun(Device& backend, const AttentionCase& c)
      : backend_(backend), case_(c), rows_(upload_heads(backend, c.rows, c.shape.row_bytes())) {
    q_ = upload(backend, c.q);
    seen_ = upload(backend, c.seen);
    const auto queries = static_cast<std::size_t>(c.tokens * c.shape.query_heads);
    lse_ = backend.allocate(backend.info().compute_tier, queries * sizeof(float));
    out_ = backend.allocate(backend.info().compute_tier,
                            queries * static_cast<std::size_t>(c.shape.head_dim) * sizeof(float));
  }

  void attend(const RowRange& range = {}, bool merge = false) {
    std::vector<RowSpan> spans = rows_.spans;
    for (RowSpan& span : spans) {
      const std::int64_t begin = std::min(range.begin, span.count);
      span.count = std::min(range.end, span.count) - begin;
      if (begin > 0) span.rows += static_cast<std::size_t>(begin) * case_.shape.row_bytes();
    }
    AttendParams p;
    p.q = q_.floats();
    p.tokens = case_.tokens;
    p.q_stride = static_cast<std::int64_t>(case_.shape.query_heads) * case_.shape.head_dim;
    p.first_query_position = case_.first_query_position;
    p.shape = case_.shape;
    p.rows = spans;
    p.first_row_position = case_.first_row_position + range.begin;
    if (!case_.seen.empty()) p.seen = reinterpret_cast<const std::int32_t*>(seen_.data());
    p.window = case_.window;
    p.listed = listed;
    p.scale = case_.scale;
    p.out = out_.floats();
    p.lse = lse_.floats();
    p.merge = merge;
    backend_.queue->run(p);
  }

  PageLists listed;  // see AttendParams

  Partial result() { return {download<float>(backend_, out_), download<float>(backend_, lse_)}; }

 private:
  Device& backend_;
  const AttentionCase& case_;
  Buffer q_;
  Buffer seen_;
  UploadedHeads rows_;
  Buffer out_;
  Buffer lse_;
};

}  // namespace sluice::testing
