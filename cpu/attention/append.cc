#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/runtime/rows.h"

namespace sluice::cpu {
namespace {

// Scratch of one KV head. Rows are built here, because they may go to device and host memory.
struct Scratch {
  std::vector<std::byte> row;  // K, then V, in the rows' dtype
  std::vector<float> value;    // V as rounded to the rows' dtype
};

void copy_row(const AppendBatchParams& p, const BatchToken& token, std::int64_t head,
              const std::vector<std::byte>& row) {
  const auto row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  const std::int64_t offset = token.position % kPageTokens * row_bytes;
  const PageSlots& at = p.rows.page(token.sequence, token.pages());
  const auto write = [&](std::byte* page) { std::memcpy(page + offset, row.data(), row.size()); };
  if (at.device != PageSlots::kNone) write(p.rows.in_device(head, at.device, row_bytes));
  if (p.rows.is_in_host(at)) write(p.rows.in_host(head, at.host, row_bytes));
}

// Token by token, so that several tokens of one sequence add to its sums in order.
void append_head(const AppendBatchParams& p, std::int64_t head) {
  const std::int64_t d = p.shape.head_dim;
  Scratch scratch{std::vector<std::byte>(p.shape.rows.payload_bytes(p.shape.head_dim)),
                  std::vector<float>(static_cast<std::size_t>(d))};
  for (std::int64_t t = 0; t < p.batch.count; ++t) {
    const BatchToken& token = p.batch.tokens[t];
    const std::int64_t from = t * p.stride + head * d;
    write_row(p.shape, p.k + from, p.v + from, scratch.row.data());
    copy_row(p, token, head, scratch.row);
    if (p.sums == nullptr) continue;
    read_value(p.shape, scratch.row.data(), scratch.value.data());
    float* const sums = p.sums + (std::int64_t{token.sequence} * p.shape.kv_heads + head) * d;
    for (std::int64_t c = 0; c < d; ++c) sums[c] += scratch.value[static_cast<std::size_t>(c)];
    if (p.token_sums != nullptr) {
      std::copy_n(sums, d, p.token_sums + (t * p.shape.kv_heads + head) * d);
    }
  }
}

}  // namespace

void append(const AppendParams& p, Threads& threads) {
  const std::int64_t head_dim = p.shape.head_dim;
  const auto write_token = [&](std::int64_t token) {
    for (int head = 0; head < p.shape.kv_heads; ++head) {
      const std::int64_t source = token * p.stride + head * head_dim;
      std::byte* const row = p.rows[static_cast<std::size_t>(head)] +
                             static_cast<std::size_t>(token) * p.shape.row_bytes();
      write_row(p.shape, p.k + source, p.v + source, row);
    }
  };
  // Below this many floats a task costs more to hand out than to do.
  constexpr std::int64_t kGrainFloats = 16 * 1024;
  threads.for_ranges(p.tokens, kGrainFloats / (p.shape.kv_heads * head_dim) + 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (std::int64_t token = begin; token < end; ++token) write_token(token);
                     });
}

void append_batch(const AppendBatchParams& p, Threads& threads) {
  const auto bytes = static_cast<std::int64_t>(p.shape.row_bytes()) * p.shape.kv_heads;
  threads.for_each(
      p.shape.kv_heads, [&](std::int64_t head) { append_head(p, head); }, p.batch.count * bytes);
}

void sum_values(const SumValuesParams& p) {
  const auto d = static_cast<std::size_t>(p.shape.head_dim);
  std::vector<float> value(d);
  for (std::size_t head = 0; head < p.rows.size(); ++head) {
    // A partial sum per call keeps the running sum's rounding at one per step.
    std::vector<float> sums(d);
    const std::byte* row = p.rows[head].rows;
    for (std::int64_t i = 0; i < p.rows[head].count; ++i, row += p.shape.row_bytes()) {
      read_value(p.shape, row, value.data());
      for (std::size_t c = 0; c < d; ++c) sums[c] += value[c];
    }
    float* const to = p.sums + head * d;
    for (std::size_t c = 0; c < d; ++c) to[c] += p.subtract ? -sums[c] : sums[c];
  }
}

}  // namespace sluice::cpu
