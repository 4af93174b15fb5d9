// Random problems of choosing tokens, in one backend's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "lib/backend.h"
#include "lib/selection.h"
#include "tests/support/attention_cases.h"
#include "tests/support/device.h"

namespace sluice::testing {

// A key index over the whole pages of an attention case, built by `backend`.
class IndexedCase {
 public:
  IndexedCase(Backend& backend, const AttentionCase& c, int bits) : backend_(backend), case_(c) {
    const std::int64_t tokens = c.count(0);
    pages_ = tokens / kPageTokens;
    const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
    const std::size_t units = static_cast<std::size_t>(pages_) * heads;
    const int d = c.shape.head_dim;
    view_.tiles.bits = bits;
    codes_ = allocate(units * static_cast<std::size_t>(d) * view_.tiles.code_bytes());
    scales_ = allocate(units * static_cast<std::size_t>(d) * 2 * sizeof(std::uint16_t));
    bounds_ = allocate(units * view_.bounds.page_bytes(d));
    bad_ = allocate(heads * sizeof(std::int32_t));
    view_.tiles.codes = codes_.data();
    view_.tiles.scales = reinterpret_cast<std::uint16_t*>(scales_.data());
    view_.tiles.capacity = view_.bounds.capacity = pages_;
    view_.bounds.bounds = reinterpret_cast<std::uint16_t*>(bounds_.data());
    q_ = upload(backend, c.q);
    for (const auto& rows : c.rows) rows_.push_back(upload(backend, rows));
    const std::vector<RowSpan> whole = rows_from(0, pages_ * kPageTokens);
    if (pages_ > 0) {
      backend.build_index(
          {c.shape, view_, 0, pages_, whole, reinterpret_cast<std::int32_t*>(bad_.data())});
    }
  }

  std::vector<RowSpan> rows_from(std::int64_t first, std::int64_t count) const {
    std::vector<RowSpan> spans;
    for (const Buffer& rows : rows_) {
      spans.push_back(
          {rows.data() + static_cast<std::size_t>(first) * case_.shape.row_bytes(), count});
    }
    return spans;
  }

  // [query_heads, tokens] for the case's only query token.
  std::vector<float> estimate(Selector method, int channels) {
    const std::int64_t tokens = case_.count(0);
    const std::int64_t first = method == Selector::exact ? 0 : pages_ * kPageTokens;
    const std::vector<RowSpan> rest = rows_from(first, tokens - first);
    Buffer logits = allocate(static_cast<std::size_t>(tokens * case_.shape.query_heads) * 4);
    EstimateParams p;
    p.q = q_.floats();
    p.shape = case_.shape;
    p.method = method;
    p.channels = channels;
    p.index = view_;
    p.pages = first / kPageTokens;
    p.rows = rest;
    p.logits = logits.floats();
    p.stride = tokens;
    backend_.estimate(p);
    return download<float>(backend_, logits);
  }

  std::vector<std::uint8_t> codes() { return download<std::uint8_t>(backend_, codes_); }
  std::vector<std::uint16_t> scales() { return download<std::uint16_t>(backend_, scales_); }
  std::vector<std::uint16_t> bounds() { return download<std::uint16_t>(backend_, bounds_); }
  std::vector<std::int32_t> bad() { return download<std::int32_t>(backend_, bad_); }
  std::int64_t pages() const { return pages_; }

 private:
  Buffer allocate(std::size_t bytes) {
    return backend_.allocate(backend_.info().compute_tier, bytes);
  }

  Backend& backend_;
  const AttentionCase& case_;
  std::int64_t pages_ = 0;
  KeyIndexView view_;
  Buffer codes_, scales_, bounds_, bad_, q_;
  std::vector<Buffer> rows_;
};

// What select() is asked and answers, in plain vectors; [kv_heads] and [query_heads] outermost.
struct SelectCase {
  KvShape shape;
  std::vector<float> logits;  // [query_heads, count]
  std::int64_t count = 0;
  std::int64_t end = 0;
  Pruner prune = Pruner::top_k;
  std::int64_t k = 0;
  float p = 0.0f;
  std::int64_t cap = std::numeric_limits<std::int32_t>::max();
  std::int64_t sinks = 0;
  std::int64_t recent_first = std::numeric_limits<std::int32_t>::max();
  std::vector<std::uint8_t> eligible;
  std::int64_t capacity = 0;  // 0: count
};

struct SelectAnswer {
  std::vector<std::vector<std::int32_t>> positions;
  std::vector<HeadSelection> heads;
  std::vector<float> alpha;
  std::vector<float> weights;  // [query_heads, count]
};

inline SelectAnswer select(Backend& backend, const SelectCase& c) {
  const std::int64_t capacity = c.capacity > 0 ? c.capacity : c.count;
  const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
  Buffer logits = upload(backend, c.logits);
  Buffer eligible = upload(backend, c.eligible);
  Buffer positions =
      upload(backend, std::vector<std::int32_t>(heads * static_cast<std::size_t>(capacity), -7));
  SelectAnswer answer;
  answer.heads.resize(heads);
  answer.alpha.resize(static_cast<std::size_t>(c.shape.query_heads));
  SelectParams p;
  p.shape = c.shape;
  p.logits = logits.floats();
  p.stride = c.count;
  p.count = c.count;
  p.end = c.end;
  p.prune = c.prune;
  p.k = c.k;
  p.p = c.p;
  p.cap = c.cap;
  p.sinks = c.sinks;
  p.recent_first = c.recent_first;
  if (!c.eligible.empty()) p.eligible = reinterpret_cast<const std::uint8_t*>(eligible.data());
  p.selected = {reinterpret_cast<std::int32_t*>(positions.data()), capacity, answer.heads.data()};
  p.alpha = answer.alpha.data();
  backend.select(p);
  answer.weights = download<float>(backend, logits);
  const std::vector<std::int32_t> all = download<std::int32_t>(backend, positions);
  for (std::size_t head = 0; head < heads; ++head) {
    const auto first = all.begin() + static_cast<std::int64_t>(head) * capacity;
    answer.positions.emplace_back(first, first + answer.heads[head].count);
  }
  return answer;
}

}  // namespace sluice::testing
