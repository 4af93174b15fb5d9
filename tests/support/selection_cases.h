// Random problems of choosing tokens, in one backend's memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "lib/backend.h"
#include "lib/element.h"
#include "lib/selection.h"
#include "tests/support/attention_cases.h"
#include "tests/support/device.h"

namespace sluice::testing {

// Logits in a backend's memory: their dtype and the distance of their rows are the backend's own.
class LogitMatrix {
 public:
  LogitMatrix(Backend& backend, std::int64_t rows, std::int64_t columns)
      : backend_(backend), rows_(rows), columns_(columns) {
    constexpr std::int64_t kUnit = LogitView::kLogitAlignment;
    stride_ = (columns + kUnit - 1) / kUnit * kUnit;
    data_ = backend.allocate(backend.info().compute_tier,
                             static_cast<std::size_t>(rows * stride_) * size_of(dtype()));
  }

  LogitView view() const { return {data_.data(), stride_}; }

  void set(const std::vector<float>& values) {
    std::vector<std::byte> bytes(data_.bytes());
    for (std::int64_t row = 0; row < rows_; ++row) {
      for (std::int64_t column = 0; column < columns_; ++column) {
        const float value = values[static_cast<std::size_t>(row * columns_ + column)];
        write_element(&bytes[offset(row, column)], dtype(), value);
      }
    }
    const CopyOp op = {data_.data(), bytes.data(), bytes.size()};
    backend_.copy({&op, 1}, Stream::compute);
  }

  std::vector<float> get() {
    const std::vector<std::byte> bytes = download<std::byte>(backend_, data_);
    std::vector<float> values;
    for (std::int64_t row = 0; row < rows_; ++row) {
      for (std::int64_t column = 0; column < columns_; ++column) {
        values.push_back(read_element(&bytes[offset(row, column)], dtype()));
      }
    }
    return values;
  }

 private:
  DType dtype() const { return backend_.info().logits.dtype; }
  std::size_t offset(std::int64_t row, std::int64_t column) const {
    return static_cast<std::size_t>(row * stride_ + column) * size_of(dtype());
  }

  Backend& backend_;
  std::int64_t rows_;
  std::int64_t columns_;
  std::int64_t stride_ = 0;
  Buffer data_;
};

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
    view_.tiles.capacity = view_.bounds.capacity = pages_;
    codes_ = allocate(view_.tiles.codes_bytes(c.shape.kv_heads, d));
    scales_ = allocate(units * static_cast<std::size_t>(d) * 2 * sizeof(std::uint16_t));
    bounds_ = allocate(units * view_.bounds.page_bytes(d));
    bad_ = backend.allocate(Tier::host, heads * sizeof(std::int32_t));
    view_.tiles.codes = codes_.data();
    view_.tiles.scales = reinterpret_cast<std::uint16_t*>(scales_.data());
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
    LogitMatrix logits(backend_, case_.shape.query_heads, tokens);
    EstimateParams p;
    p.q = q_.floats();
    p.shape = case_.shape;
    p.method = method;
    p.channels = channels;
    p.index = view_;
    p.pages = first / kPageTokens;
    p.rows = rest;
    p.logits = logits.view();
    backend_.estimate(p);
    return logits.get();
  }

  std::vector<std::uint8_t> codes() { return download<std::uint8_t>(backend_, codes_); }
  std::vector<std::uint16_t> scales() { return download<std::uint16_t>(backend_, scales_); }
  std::vector<std::uint16_t> bounds() { return download<std::uint16_t>(backend_, bounds_); }
  std::vector<std::int32_t> bad() {
    backend_.synchronize();
    const auto* const flags = reinterpret_cast<const std::int32_t*>(bad_.data());
    return {flags, flags + case_.shape.kv_heads};
  }
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

// What select() is asked and answers, in plain vectors. A head is a KV head of a token: number
// token * kv_heads + KV head; rows are the query heads of all tokens.
struct SelectCase {
  KvShape shape;
  std::vector<BatchToken> tokens;
  std::int64_t context = 0;   // positions lie below
  std::vector<float> logits;  // [rows, columns]; empty: there are none
  std::int64_t columns = 0;
  bool skip_newest = false;
  std::vector<std::vector<std::int32_t>> candidates;  // [heads] or empty
  Pruner prune = Pruner::top_k;
  Quota k;
  float p = 0.0f;
  Quota cap;
  std::int64_t sinks = 0;
  std::int64_t recent = 0;
  std::vector<std::uint8_t> eligible;  // [sequences, context] or empty
  std::vector<float> share;            // [rows] or empty
  std::int64_t capacity = 0;           // 0: columns

  int heads() const { return static_cast<int>(std::ssize(tokens)) * shape.kv_heads; }
  int rows() const { return heads() * shape.group(); }
  const BatchToken& token(int head) const {
    return tokens[static_cast<std::size_t>(head / shape.kv_heads)];
  }
  // Entries that may be emitted, and those with logits.
  std::int64_t emit(int head) const {
    return candidates.empty() ? token(head).page_first()
                              : std::ssize(candidates[static_cast<std::size_t>(head)]);
  }
  std::int64_t total(int head) const {
    return emit(head) + (skip_newest ? 0 : token(head).count() - token(head).page_first());
  }
  std::int64_t position(int head, std::int64_t i) const {
    return candidates.empty()
               ? i
               : candidates[static_cast<std::size_t>(head)][static_cast<std::size_t>(i)];
  }
  bool is_out(int head, std::int64_t i) const {
    if (eligible.empty() || i >= emit(head)) return false;
    return eligible[static_cast<std::size_t>(token(head).sequence * context + position(head, i))] ==
           0;
  }
  bool is_forced(int head, std::int64_t i) const {
    const std::int64_t at = position(head, i);
    return !is_out(head, i) && (at < sinks || at >= token(head).count() - recent);
  }
  // The same for one of the tokens alone.
  SelectCase alone(int token) const {
    SelectCase c = *this;
    c.tokens = {tokens[static_cast<std::size_t>(token)]};
    const auto part = [&](auto& all, std::int64_t each) {
      if (all.empty()) return;
      const auto first = all.begin() + token * each;
      all = std::remove_reference_t<decltype(all)>(first, first + each);
    };
    part(c.logits, shape.query_heads * columns);
    part(c.candidates, shape.kv_heads);
    part(c.share, shape.query_heads);
    return c;
  }
};

struct SelectAnswer {
  std::vector<std::vector<std::int32_t>> positions;  // [heads]
  std::vector<HeadSelection> heads;
  std::vector<float> alpha;     // [rows]
  std::vector<float> lse;       // [rows]
  std::vector<float> logits;    // [rows, columns], as the backend saw them
  std::vector<double> weights;  // likewise: their softmax over what is eligible
};

inline std::vector<double> weights_of(const SelectCase& c, const std::vector<float>& logits) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> weights;
  for (int r = 0; r < c.rows() && !logits.empty(); ++r) {
    const int head = r / c.shape.group();
    std::vector<double> own(static_cast<std::size_t>(c.columns), kNone);
    for (std::int64_t i = 0; i < c.total(head); ++i) {
      if (c.is_out(head, i)) continue;
      own[static_cast<std::size_t>(i)] =
          static_cast<double>(logits[static_cast<std::size_t>(r * c.columns + i)]);
    }
    const double highest = *std::max_element(own.begin(), own.end());
    double sum = 0.0;
    for (double& x : own) sum += x = x > kNone ? std::exp(x - highest) : 0.0;
    for (const double x : own) weights.push_back(x / sum);
  }
  return weights;
}

// Candidates in a backend's memory.
class CandidateLists {
 public:
  CandidateLists(Backend& backend, const SelectCase& c) {
    std::vector<std::int32_t> positions;
    std::vector<HeadSelection> heads;
    view_.capacity = c.columns - kPageTokens;
    for (const auto& list : c.candidates) {
      positions.insert(positions.end(), list.begin(), list.end());
      heads.emplace_back().count = static_cast<std::int32_t>(list.size());
      positions.resize(heads.size() * static_cast<std::size_t>(view_.capacity), 1 << 30);
    }
    positions_ = upload(backend, positions);
    heads_ = upload(backend, heads);
    view_.positions = reinterpret_cast<std::int32_t*>(positions_.data());
    view_.heads = reinterpret_cast<HeadSelection*>(heads_.data());
  }
  const SelectionView& view() const { return view_; }

 private:
  Buffer positions_;
  Buffer heads_;
  SelectionView view_;
};

inline SelectAnswer select(Backend& backend, const SelectCase& c) {
  const std::int64_t capacity = c.capacity > 0 ? c.capacity : std::max(c.columns, c.context);
  const auto heads = static_cast<std::size_t>(c.heads());
  const auto rows = static_cast<std::size_t>(c.rows());
  const Buffer tokens = upload(backend, c.tokens);
  LogitMatrix logits(backend, c.rows(), std::max<std::int64_t>(c.columns, 1));
  const CandidateLists candidates(backend, c);
  const Buffer eligible = upload(backend, c.eligible);
  const Buffer share = upload(backend, c.share);
  const Buffer positions =
      upload(backend, std::vector<std::int32_t>(heads * static_cast<std::size_t>(capacity), -7));
  const Buffer found = backend.allocate(Tier::host, heads * sizeof(HeadSelection));
  const Buffer alpha = backend.allocate(Tier::host, rows * sizeof(float));
  const Buffer lse = backend.allocate(backend.info().compute_tier, rows * sizeof(float));
  SelectAnswer answer;
  SelectParams p;
  p.shape = c.shape;
  p.batch = {reinterpret_cast<const BatchToken*>(tokens.data()), std::ssize(c.tokens), c.context};
  if (!c.logits.empty()) {
    logits.set(c.logits);
    p.logits = logits.view();
    answer.logits = logits.get();
    answer.weights = weights_of(c, answer.logits);
  }
  p.skip_newest = c.skip_newest;
  if (!c.candidates.empty()) p.candidates = &candidates.view();
  p.prune = c.prune;
  p.k = c.k;
  p.p = c.p;
  p.cap = c.cap;
  p.sinks = c.sinks;
  p.recent = c.recent;
  if (!c.eligible.empty()) {
    p.eligible = reinterpret_cast<const std::uint8_t*>(eligible.data());
    p.eligible_stride = c.context;
  }
  p.selected = {reinterpret_cast<std::int32_t*>(positions.data()), capacity,
                reinterpret_cast<HeadSelection*>(found.data())};
  if (!c.share.empty()) p.share = share.floats();
  p.alpha = alpha.floats();
  p.lse = lse.floats();
  backend.select(p);
  const std::vector<std::int32_t> all = download<std::int32_t>(backend, positions);
  answer.heads.assign(p.selected.heads, p.selected.heads + heads);
  answer.alpha.assign(p.alpha, p.alpha + rows);
  answer.lse = download<float>(backend, lse);
  for (std::size_t head = 0; head < heads; ++head) {
    const auto first = all.begin() + static_cast<std::int64_t>(head) * capacity;
    answer.positions.emplace_back(first, first + answer.heads[head].count);
  }
  return answer;
}

}  // namespace sluice::testing
