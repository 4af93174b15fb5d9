// Random problems of choosing tokens, in one backend's memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
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
  std::vector<float> lse;
  std::vector<float> logits;    // [query_heads, count], as the backend saw them
  std::vector<double> weights;  // likewise: their softmax over what is eligible
};

inline std::vector<double> weights_of(const SelectCase& c, const std::vector<float>& logits) {
  std::vector<double> weights;
  for (int head = 0; head < c.shape.query_heads; ++head) {
    const float* const row = logits.data() + head * c.count;
    std::vector<double> own;
    double highest = -std::numeric_limits<double>::infinity();
    for (std::int64_t t = 0; t < c.count; ++t) {
      const auto at = static_cast<std::size_t>(t);
      const bool out = at < c.eligible.size() && c.eligible[at] == 0;
      own.push_back(out ? -std::numeric_limits<double>::infinity() : static_cast<double>(row[t]));
      highest = std::max(highest, own.back());
    }
    double sum = 0.0;
    for (double& x : own) sum += x = std::exp(x - highest);
    for (const double x : own) weights.push_back(x / sum);
  }
  return weights;
}

inline SelectAnswer select(Backend& backend, const SelectCase& c) {
  const std::int64_t capacity = c.capacity > 0 ? c.capacity : c.count;
  const auto heads = static_cast<std::size_t>(c.shape.kv_heads);
  LogitMatrix logits(backend, c.shape.query_heads, c.count);
  logits.set(c.logits);
  Buffer eligible = upload(backend, c.eligible);
  Buffer positions =
      upload(backend, std::vector<std::int32_t>(heads * static_cast<std::size_t>(capacity), -7));
  const auto queries = static_cast<std::size_t>(c.shape.query_heads);
  const Buffer found = backend.allocate(Tier::host, heads * sizeof(HeadSelection));
  const Buffer alpha = backend.allocate(Tier::host, queries * sizeof(float));
  const Buffer lse = backend.allocate(backend.info().compute_tier, queries * sizeof(float));
  SelectAnswer answer;
  SelectParams p;
  p.shape = c.shape;
  p.logits = logits.view();
  p.count = c.count;
  p.end = c.end;
  p.prune = c.prune;
  p.k = c.k;
  p.p = c.p;
  p.cap = c.cap;
  p.sinks = c.sinks;
  p.recent_first = c.recent_first;
  if (!c.eligible.empty()) p.eligible = reinterpret_cast<const std::uint8_t*>(eligible.data());
  p.selected = {reinterpret_cast<std::int32_t*>(positions.data()), capacity,
                reinterpret_cast<HeadSelection*>(found.data())};
  p.alpha = alpha.floats();
  p.lse = lse.floats();
  answer.logits = logits.get();
  answer.weights = weights_of(c, answer.logits);
  backend.select(p);
  const std::vector<std::int32_t> all = download<std::int32_t>(backend, positions);
  answer.heads.assign(p.selected.heads, p.selected.heads + heads);
  answer.alpha.assign(p.alpha, p.alpha + queries);
  answer.lse = download<float>(backend, lse);
  for (std::size_t head = 0; head < heads; ++head) {
    const auto first = all.begin() + static_cast<std::int64_t>(head) * capacity;
    answer.positions.emplace_back(first, first + answer.heads[head].count);
  }
  return answer;
}

}  // namespace sluice::testing
