#include "cpu/dense/dense.h"

#include <cstring>
#include <vector>

#include "cpu/dense/coded_linear.h"
#include "cpu/runtime/elementwise.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Runs body(row, scratch) for every row, several rows to a task; scratch has `columns` floats.
void for_rows(std::int64_t rows, std::int64_t columns, Threads& threads, const auto& body) {
  // Below this many floats a task costs more to hand out than to do.
  constexpr std::int64_t kGrainFloats = 16 * 1024;
  threads.for_ranges(rows, kGrainFloats / columns + 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(columns));
    for (std::int64_t row = begin; row < end; ++row) body(row, scratch.data());
  });
}

}  // namespace

void embed(const EmbedParams& p) {
  check(p.y.dtype == DType::f32, "embed: output must be f32");
  const auto* const coded = dynamic_cast<const CodedWeight*>(p.coded);
  check((coded != nullptr) == (p.coded != nullptr), "embed: a weight of another backend");
  const std::int64_t rows = coded != nullptr ? coded->outputs() : p.table.rows;
  for (std::int64_t i = 0; i < p.y.rows; ++i) {
    std::byte* const to = row_of(p.y, i);
    if (p.ids[i] < 0 || p.ids[i] >= rows) {
      std::memset(to, 0, static_cast<std::size_t>(p.y.columns) * sizeof(float));
    } else if (coded != nullptr) {
      unpack_row(coded->matrix(), p.ids[i], reinterpret_cast<float*>(to));
    } else {
      convert(row_of(p.table, p.ids[i]), p.table.dtype, to, DType::f32, p.table.columns);
    }
  }
}

void rms_norm(const RmsNormParams& p, Threads& threads) {
  for_rows(p.x.rows, p.x.columns, threads, [&](std::int64_t row, float* scratch) {
    const auto* x = reinterpret_cast<const float*>(row_of(p.x, row));
    rms_norm_row(x, p.weight, p.epsilon, p.x.columns, scratch);
    convert(scratch, DType::f32, row_of(p.y, row), p.y.dtype, p.y.columns);
  });
}

void rope(const RopeParams& p, const RopeTable& table, Threads& threads) {
  for_rows(p.tokens, std::int64_t{p.heads()} * p.head_dim, threads,
           [&](std::int64_t token, float*) {
             for (int head = 0; head < p.heads(); ++head) {
               float* const x = p.x + token * p.stride + std::int64_t{head} * p.head_dim;
               if (const float* const norm = p.norm_of(head)) {
                 rms_norm_row(x, norm, p.norm_epsilon, p.head_dim, x);
               }
               rope_head(x, table.cosines(token), table.sines(token), p.head_dim);
             }
           });
}

void swiglu(const SwigluParams& p, Threads& threads) {
  const std::int64_t columns = p.y.columns;
  for_rows(p.y.rows, columns, threads, [&](std::int64_t row, float* scratch) {
    const auto* gate = reinterpret_cast<const float*>(row_of(p.gate_up, row));
    swiglu_row(gate, gate + columns, columns, scratch);
    convert(scratch, DType::f32, row_of(p.y, row), p.y.dtype, columns);
  });
}

void cast(const CastParams& p, Threads& threads) {
  check(p.from.rows == p.to.rows && p.from.columns == p.to.columns, "cast: shapes disagree");
  for_rows(p.from.rows, p.from.columns, threads, [&](std::int64_t row, float*) {
    convert(row_of(p.from, row), p.from.dtype, row_of(p.to, row), p.to.dtype, p.from.columns);
  });
}

void sample(const SampleParams& p, Threads& threads) {
  threads.for_each(static_cast<std::int64_t>(p.tokens.size()), [&](std::int64_t i) {
    const auto* const row = reinterpret_cast<const float*>(row_of(p.logits, i));
    const auto at = static_cast<std::size_t>(i);
    p.tokens[at] = draw_token({row, static_cast<std::size_t>(p.logits.columns)}, p.draws[at]);
  });
}

}  // namespace sluice::cpu
