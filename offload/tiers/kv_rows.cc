#include "offload/tiers/kv_rows.h"

#include <algorithm>
#include <cmath>

#include "lib/check.h"

namespace sluice {
namespace {

std::vector<RowRun> runs_of(const BlockTables& tables, std::int32_t sequence, std::int64_t first,
                            std::int64_t end, int set, bool nearest) {
  std::vector<RowRun> runs;
  for (std::int64_t at = first; at < end;) {
    const std::int64_t page = at / kPageTokens;
    const std::int64_t next = std::min(end, (page + 1) * kPageTokens);
    const PageSlots slots = tables.page(sequence, page, set);
    const bool near = nearest && slots.device != PageSlots::kNone;
    const RowRun run{
        near ? RowPlace::device : RowPlace::host, at, next - at,
        (near ? slots.device : slots.host) * std::int64_t{kPageTokens} + at % kPageTokens};
    const bool follows = !runs.empty() && runs.back().place == run.place &&
                         runs.back().number + runs.back().count == run.number;
    if (follows) {
      runs.back().count += run.count;
    } else {
      runs.push_back(run);
    }
    at = next;
  }
  return runs;
}

}  // namespace

std::string damage_of(const KvShape& shape) {
  return shape.rows == DType::f16 ? ", or beyond 65504, where rows of f16 end (`kv_dtype`)" : "";
}

std::vector<RowRun> host_runs(const BlockTables& tables, std::int32_t sequence, std::int64_t first,
                              std::int64_t end, int set) {
  return runs_of(tables, sequence, first, end, set, false);
}

std::vector<RowRun> nearest_runs(const BlockTables& tables, std::int32_t sequence,
                                 std::int64_t first, std::int64_t end, int set) {
  return runs_of(tables, sequence, first, end, set, true);
}

RowRun whole_run(const BlockTables& tables, std::int32_t sequence, std::int64_t end, int set,
                 bool in_place) {
  const std::vector<RowRun> near = nearest_runs(tables, sequence, 0, end, set);
  if (!in_place && near.size() == 1 && near[0].place == RowPlace::device) return near[0];
  const std::vector<RowRun> host = host_runs(tables, sequence, 0, end, set);
  return host.size() == 1 ? host[0] : RowRun();
}

WholePages run_of(std::int32_t sequence, std::int64_t first_page, std::int64_t pages,
                  std::span<const RowSpan> rows) {
  WholePages run;
  run.count = pages;
  run.run_sequence = sequence;
  run.first = first_page;
  run.run_rows = rows[0].rows;
  run.head_stride = rows.size() > 1 ? rows[1].rows - rows[0].rows : 0;
  for (std::size_t head = 0; head < rows.size(); ++head) {
    check(rows[head].rows == run.run_rows + static_cast<std::int64_t>(head) * run.head_stride,
          "rows of KV heads at uneven distances");
  }
  return run;
}

AttendParams attend_params(const KvShape& shape, const StepRange& step, const Queries& queries) {
  AttendParams params;
  params.q = queries.q;
  params.tokens = step.tokens;
  params.q_stride = queries.stride;
  params.first_query_position = step.first;
  params.shape = shape;
  params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  params.out = queries.out;
  params.lse = queries.lse;
  return params;
}

Traffic traffic_of(const KvShape& shape, std::int64_t tokens) {
  const std::uint64_t rows =
      static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(shape.kv_heads);
  return {rows, rows * shape.row_bytes()};
}

}  // namespace sluice
