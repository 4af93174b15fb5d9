#include "cpu/cpu_queue.h"

#include <cstring>
#include <vector>

#include "cpu/attention/attention.h"
#include "cpu/runtime/elementwise.h"
#include "cpu/scan/scan.h"
#include "cpu/select/select.h"
#include "cpu/values/values.h"
#include "lib/check.h"
#include "lib/read_heads.h"

namespace sluice::cpu {
namespace {

// Below this many floats a task costs more to hand out than to do.
constexpr std::int64_t kGrainFloats = 16 * 1024;

}  // namespace

void CpuQueue::copy(std::span<const CopyOp> ops) {
  std::size_t bytes = 0;
  for (const CopyOp& op : ops) bytes += op.bytes;
  const auto items = static_cast<std::int64_t>(ops.size());
  // A single row per head is not worth waking a thread.
  const std::int64_t grain = bytes < (std::size_t{64} << 10) ? items : 1;
  threads().for_ranges(items, grain, [&](std::int64_t begin, std::int64_t end) {
    for (const CopyOp& op :
         ops.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin))) {
      if (op.bytes > 0) std::memcpy(op.to, op.from, op.bytes);  // of nothing may be null
    }
  });
}

void CpuQueue::for_rows(std::int64_t rows, std::int64_t columns, const auto& body) {
  threads().for_ranges(rows, kGrainFloats / columns + 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> scratch(static_cast<std::size_t>(columns));
    for (std::int64_t row = begin; row < end; ++row) body(row, scratch.data());
  });
}

void CpuQueue::embed(const Matrix& table, const TokenId* ids, const Matrix& y) {
  check(y.dtype == DType::f32, "embed: output must be f32");
  for (std::int64_t i = 0; i < y.rows; ++i) {
    std::byte* const to = row_of(y, i);
    if (ids[i] >= 0 && ids[i] < table.rows) {
      convert(row_of(table, ids[i]), table.dtype, to, DType::f32, table.columns);
    } else {
      std::memset(to, 0, static_cast<std::size_t>(table.columns) * sizeof(float));
    }
  }
}

void CpuQueue::linear(const LinearParams& params) { own().products().run(params); }

void CpuQueue::write_weight(Weight& weight, std::int64_t first, const Matrix& rows) {
  own().products().write(weight, first, rows);
}

void CpuQueue::rms_norm(const RmsNormParams& p) {
  for_rows(p.x.rows, p.x.columns, [&](std::int64_t row, float* scratch) {
    const auto* x = reinterpret_cast<const float*>(row_of(p.x, row));
    rms_norm_row(x, p.weight, p.epsilon, p.x.columns, scratch);
    convert(scratch, DType::f32, row_of(p.y, row), p.y.dtype, p.y.columns);
  });
}

void CpuQueue::rope(const RopeParams& p) {
  rope_table_.update(p);
  for_rows(p.tokens, std::int64_t{p.heads()} * p.head_dim, [&](std::int64_t token, float*) {
    for (int head = 0; head < p.heads(); ++head) {
      float* const x = p.x + token * p.stride + std::int64_t{head} * p.head_dim;
      if (const float* const norm = p.norm_of(head)) {
        rms_norm_row(x, norm, p.norm_epsilon, p.head_dim, x);
      }
      rope_head(x, rope_table_.cosines(token), rope_table_.sines(token), p.head_dim);
    }
  });
}

void CpuQueue::swiglu(const SwigluParams& p) {
  const std::int64_t columns = p.y.columns;
  for_rows(p.y.rows, columns, [&](std::int64_t row, float* scratch) {
    const auto* gate = reinterpret_cast<const float*>(row_of(p.gate_up, row));
    swiglu_row(gate, gate + columns, columns, scratch);
    convert(scratch, DType::f32, row_of(p.y, row), p.y.dtype, columns);
  });
}

void CpuQueue::cast(const Matrix& from, const Matrix& to) {
  check(from.rows == to.rows && from.columns == to.columns, "cast: shapes disagree");
  for_rows(from.rows, from.columns, [&](std::int64_t row, float*) {
    convert(row_of(from, row), from.dtype, row_of(to, row), to.dtype, from.columns);
  });
}

void CpuQueue::read_heads(const ReadHeadsParams& params) { sluice::read_heads(params); }

void CpuQueue::sample(const Matrix& logits, std::span<const TokenDraw> params,
                      std::span<SampledToken> tokens) {
  threads().for_each(static_cast<std::int64_t>(tokens.size()), [&](std::int64_t i) {
    const auto* const row = reinterpret_cast<const float*>(row_of(logits, i));
    const auto at = static_cast<std::size_t>(i);
    tokens[at] = draw_token({row, static_cast<std::size_t>(logits.columns)}, params[at]);
  });
}

void CpuQueue::append(const AppendParams& p) {
  const std::int64_t head_dim = p.shape.head_dim;
  const std::size_t value_offset = static_cast<std::size_t>(head_dim) * size_of(p.shape.dtype);
  for_rows(p.tokens, p.shape.kv_heads * head_dim, [&](std::int64_t token, float*) {
    for (int head = 0; head < p.shape.kv_heads; ++head) {
      const std::int64_t source = token * p.stride + head * head_dim;
      std::byte* const row = p.rows[static_cast<std::size_t>(head)] +
                             static_cast<std::size_t>(token) * p.shape.row_bytes();
      convert(p.k + source, DType::f32, row, p.shape.dtype, head_dim);
      convert(p.v + source, DType::f32, row + value_offset, p.shape.dtype, head_dim);
    }
  });
  copy_home(*this, p);
}

void CpuQueue::append_batch(const AppendBatchParams& params) {
  cpu::append_batch(params, threads());
}

void CpuQueue::attend(const AttendParams& params) { cpu::attend(params, threads()); }

void CpuQueue::attend_batch(const AttendBatchParams& params) {
  cpu::attend_batch(params, threads());
}

void CpuQueue::build_index(const BuildIndexParams& params) { cpu::build_index(params, threads()); }

void CpuQueue::build_batch(const BuildBatchParams& params) { cpu::build_batch(params, threads()); }

void CpuQueue::estimate(const EstimateParams& params) { cpu::estimate(params, threads()); }

void CpuQueue::select(const SelectParams& params) { cpu::select(params, threads()); }

void CpuQueue::find_rows(const FindRowsParams& params) { cpu::find_rows(params, threads()); }

void CpuQueue::forget_rows(const ForgetRowsParams& params) { cpu::forget_rows(params); }

void CpuQueue::attend_selected(const AttendSelectedParams& params) {
  cpu::attend_selected(params, threads());
}

void CpuQueue::gather(const GatherParams& params) { cpu::gather(params, threads()); }

void CpuQueue::pack_tokens(const PackTokensParams& params) { cpu::pack_tokens(params, threads()); }

void CpuQueue::unpack_tokens(const UnpackTokensParams& params) {
  cpu::unpack_tokens(params, threads());
}

void CpuQueue::column_sums(const ColumnSumsParams& params) { cpu::column_sums(params, threads()); }

void CpuQueue::choose_tokens(const ChooseTokensParams& params) { cpu::choose_tokens(params); }

void CpuQueue::page_means(const PageMeansParams& params) { cpu::page_means(params, threads()); }

void CpuQueue::choose_pages(const ChoosePagesParams& params) {
  cpu::choose_pages(params, threads());
}

void CpuQueue::sum_values(const SumValuesParams& params) { cpu::sum_values(params); }

void CpuQueue::build_values(const BuildValuesParams& params) {
  cpu::build_values(params, threads());
}

void CpuQueue::build_values_batch(const BuildValuesBatchParams& params) {
  cpu::build_values_batch(params, threads());
}

void CpuQueue::attend_tiles(const AttendTilesParams& params) {
  cpu::attend_tiles(params, threads());
}

void CpuQueue::merge_partials(const MergePartialsParams& params) { cpu::merge_partials(params); }

}  // namespace sluice::cpu
