// A caller of KvCache: the arrays of a Script in any dtype, layout and memory, and the expected
// attention in fp64.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/backend/memory.h"
#include "sluice/kv_cache.h"
#include "tests/support/attention_oracle.h"
#include "tests/support/device.h"
#include "tests/support/elements.h"
#include "tests/support/script.h"

namespace sluice::testing {

// The order of heads and tokens in memory.
enum class Order { dense, part_of_a_row, heads_first };

// One dense array [tokens, heads, head_dim] in a caller's layout.
class CallerArray {
 public:
  // In the memory of `device`; null: host memory.
  CallerArray(std::int64_t tokens, int heads, int head_dim, DType dtype, Order order,
              Device* device)
      : tokens_(tokens), heads_(heads), dim_(head_dim), device_(device) {
    layout_.dtype = dtype;
    layout_.tier = device != nullptr ? Tier::device : Tier::host;
    if (order == Order::part_of_a_row) layout_.token_stride = heads * head_dim + 24;
    if (order == Order::heads_first) {
      layout_.token_stride = head_dim;
      layout_.head_stride = tokens * head_dim + 8;
    }
    values_.assign(static_cast<std::size_t>(tokens * (heads * head_dim + 24) + heads * 8), -7.0f);
  }

  void fill(const float* dense) {
    for (std::int64_t i = 0; i < tokens_ * heads_ * dim_; ++i) values_[at(i)] = dense[i];
  }
  KvInput input() {
    bytes_ = encoded(values_, layout_.dtype);
    if (device_ == nullptr) return {bytes_.data(), layout_};
    buffer_ = upload(*device_, bytes_);
    device_->synchronize();
    return {buffer_.data(), layout_};
  }
  KvOutput output() {
    input();
    return {device_ == nullptr ? bytes_.data() : buffer_.data(), layout_};
  }
  // Returns the written values, dense, and checks that the gaps between them are unchanged.
  std::vector<float> read() {
    if (device_ != nullptr) bytes_ = download<std::byte>(*device_, buffer_);
    std::vector<float> all = decoded(bytes_, layout_.dtype);
    std::vector<float> dense;
    for (std::int64_t i = 0; i < tokens_ * heads_ * dim_; ++i) {
      dense.push_back(all[at(i)]);
      all[at(i)] = -7.0f;
    }
    EXPECT_TRUE(std::all_of(all.begin(), all.end(), [](float x) { return x == -7.0f; }));
    return dense;
  }

 private:
  std::size_t at(std::int64_t dense) const {
    const std::int64_t head_stride = layout_.head_stride > 0 ? layout_.head_stride : dim_;
    const std::int64_t token_stride =
        layout_.token_stride > 0 ? layout_.token_stride : heads_ * head_stride;
    return static_cast<std::size_t>(dense / (heads_ * dim_) * token_stride +
                                    dense / dim_ % heads_ * head_stride + dense % dim_);
  }

  std::int64_t tokens_;
  int heads_;
  int dim_;
  Device* device_;
  ArrayLayout layout_;
  std::vector<float> values_;
  std::vector<std::byte> bytes_;
  Buffer buffer_;
};

// The attention results of one step, for all layers.
struct Attended {
  std::vector<float> out;  // [layers, tokens, query_heads, head_dim]
  std::vector<float> lse;  // [layers, tokens, query_heads]
};

// A range of tokens of a script; a step takes several.
struct ScriptPart {
  const Script* script = nullptr;
  std::int64_t first = 0;
  std::int64_t tokens = 0;
};

struct CallerFormat {
  DType in = DType::f32;
  DType out = DType::f32;
  Order order = Order::dense;
  Device* device = nullptr;  // memory of the arrays; null: host memory
};

// Runs all layers of a step and ends it.
inline Attended run_step(KvStep& step, const KvShape& shape, std::span<const ScriptPart> parts,
                         const CallerFormat& format = {}) {
  std::int64_t tokens = 0;
  for (const ScriptPart& part : parts) tokens += part.tokens;
  Attended result;
  for (int layer = 0; layer < shape.layers; ++layer) {
    std::vector<float> q, k, v;
    for (const ScriptPart& p : parts) {
      const auto at = static_cast<std::size_t>(layer);
      const auto add = [&](std::vector<float>& all, const float* from, std::int64_t width) {
        all.insert(all.end(), from, from + p.tokens * width);
      };
      add(q, p.script->q(at, p.first), p.script->query_width());
      add(k, p.script->k(at, p.first), p.script->key_width());
      add(v, p.script->v(at, p.first), p.script->key_width());
    }
    const auto array = [&](int heads, DType dtype) {
      return CallerArray(tokens, heads, shape.head_dim, dtype, format.order, format.device);
    };
    CallerArray keys = array(shape.kv_heads, format.in);
    CallerArray values = array(shape.kv_heads, format.in);
    CallerArray queries = array(shape.query_heads, format.in);
    CallerArray out = array(shape.query_heads, format.out);
    keys.fill(k.data());
    values.fill(v.data());
    queries.fill(q.data());
    std::vector<float> lse(static_cast<std::size_t>(tokens * shape.query_heads), -7.0f);
    Buffer device_lse = format.device != nullptr ? upload(*format.device, lse) : Buffer();
    if (format.device != nullptr) format.device->synchronize();
    step.append(layer, keys.input(), values.input());
    step.attend(layer, queries.input(), out.output(),
                format.device != nullptr ? device_lse.floats() : lse.data());
    if (format.device != nullptr) lse = download<float>(*format.device, device_lse);
    const std::vector<float> attended = out.read();
    result.out.insert(result.out.end(), attended.begin(), attended.end());
    result.lse.insert(result.lse.end(), lse.begin(), lse.end());
  }
  step.end();
  return result;
}

// Runs the next tokens of a sequence whose positions are those of its script.
inline Attended take(KvSequence& sequence, const KvShape& shape, const Script& script, Phase phase,
                     std::int64_t tokens, const CallerFormat& format = {}) {
  const ScriptPart part = {&script, sequence.length(), tokens};
  KvStep step = sequence.begin_step(phase, tokens);
  return run_step(step, shape, {&part, 1}, format);
}

// The expected results for tokens [first, first + tokens) of a script, if the tokens before them
// are also the script's and all arrays had the dtype `in`.
inline Attended expected_of(const Script& script, const KvShape& shape, std::int64_t first,
                            std::int64_t tokens, double scale, DType in = DType::f32) {
  Attended result;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const auto at = static_cast<std::size_t>(layer);
    AttentionCase c;
    c.shape = shape;
    c.tokens = tokens;
    c.first_query_position = first;
    c.scale = static_cast<float>(scale);
    c.q = rounded({script.q(at, first), script.q(at, first) + tokens * script.query_width()}, in);
    const std::int64_t rows = first + tokens;
    const auto values = [&](const float* from) {
      return rounded({from, from + rows * script.key_width()}, in);
    };
    const std::vector<float> k = values(script.k(at, 0));
    const std::vector<float> v = values(script.v(at, 0));
    for (int head = 0; head < shape.kv_heads; ++head) {
      c.rows.emplace_back(static_cast<std::size_t>(rows) * shape.row_bytes());
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t from = row * script.key_width() + std::int64_t{head} * shape.head_dim;
        set_row(c, head, row, k.data() + from, v.data() + from);
      }
    }
    const AttentionOracle oracle(c);
    for (std::int64_t token = 0; token < tokens; ++token) {
      for (int head = 0; head < shape.query_heads; ++head) {
        const QueryOracle query = oracle.query(token, head);
        for (const double x : query.out) result.out.push_back(static_cast<float>(x));
        result.lse.push_back(static_cast<float>(query.lse));
      }
    }
  }
  return result;
}

}  // namespace sluice::testing
