// Random selection problems in one backend's memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "lib/backend/memory.h"
#include "lib/backend/queue.h"
#include "sluice/element.h"
#include "tests/support/attention_cases.h"
#include "tests/support/device.h"

namespace sluice::testing {

// Logits in a backend's memory, with the backend's own dtype and row stride.
class LogitMatrix {
 public:
  LogitMatrix(Device& backend, std::int64_t rows, std::int64_t columns)
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
    backend_.queue->copy({&op, 1});
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

  Device& backend_;
  std::int64_t rows_;
  std::int64_t columns_;
  std::int64_t stride_ = 0;
  Buffer data_;
};

// The inputs of select() in plain vectors. A head is a KV head of a token, with index token *
// kv_heads + KV head; rows are the query heads of all tokens.
struct SelectCase {
  KvShape shape;
  std::vector<BatchToken> tokens;
  std::int64_t context = 0;   // exclusive bound of positions
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
  std::vector<float> share;   // [rows] or empty
  std::int64_t capacity = 0;  // 0: columns

  int heads() const { return static_cast<int>(std::ssize(tokens)) * shape.kv_heads; }
  int rows() const { return heads() * shape.group(); }
  const BatchToken& token(int head) const {
    return tokens[static_cast<std::size_t>(head / shape.kv_heads)];
  }
  // The number of entries that may be emitted, and of those with logits.
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
  bool is_forced(int head, std::int64_t i) const {
    const std::int64_t at = position(head, i);
    return at < sinks || at >= token(head).count() - recent;
  }
  // The same problem for one of the tokens.
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
  std::vector<float> logits;    // [rows, columns], as stored by the backend
  std::vector<double> weights;  // [rows, columns], softmax
};

inline std::vector<double> weights_of(const SelectCase& c, const std::vector<float>& logits) {
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> weights;
  for (int r = 0; r < c.rows() && !logits.empty(); ++r) {
    const int head = r / c.shape.group();
    std::vector<double> own(static_cast<std::size_t>(c.columns), kNone);
    for (std::int64_t i = 0; i < c.total(head); ++i) {
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

// Candidate lists in a backend's memory.
class CandidateLists {
 public:
  CandidateLists(Device& backend, const SelectCase& c) {
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

inline SelectAnswer select(Device& backend, const SelectCase& c) {
  const std::int64_t capacity = c.capacity > 0 ? c.capacity : std::max(c.columns, c.context);
  const auto heads = static_cast<std::size_t>(c.heads());
  const auto rows = static_cast<std::size_t>(c.rows());
  const Buffer tokens = upload(backend, c.tokens);
  LogitMatrix logits(backend, c.rows(), std::max<std::int64_t>(c.columns, 1));
  const CandidateLists candidates(backend, c);
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
  p.selected = {reinterpret_cast<std::int32_t*>(positions.data()), capacity,
                reinterpret_cast<HeadSelection*>(found.data())};
  if (!c.share.empty()) p.share = share.floats();
  p.alpha = alpha.floats();
  p.lse = lse.floats();
  backend.queue->run(p);
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
