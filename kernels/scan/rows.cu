#include <algorithm>

#include "kernels/runtime/dispatch.h"
#include "kernels/scan/rows.cuh"
#include "kernels/scan/rows.h"
#include "lib/backend/index_ops.h"

namespace sluice::cuda {
namespace {

constexpr std::int64_t kUnitRows = kRowWarps * kTileRows;  // of a block at once

RowScanArgs common_args(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a{};
  a.tokens = p.batch.tokens;
  a.rows = p.rows;
  a.row_bytes = static_cast<std::int64_t>(p.shape.row_bytes());
  a.table = p.index.slots;
  a.table_stride = p.index.table_stride;
  a.queries = query_args(pass);
  if (p.candidates != nullptr) {
    a.positions = p.candidates->positions;
    a.position_capacity = p.candidates->capacity;
    a.candidates = p.candidates->heads;
  }
  a.logits = reinterpret_cast<__half*>(p.logits.data);
  a.stride = p.logits.stride;
  a.token_count = static_cast<int>(p.batch.count);
  a.kv_heads = p.shape.kv_heads;
  a.elements = p.shape.head_dim;
  a.wide = p.shape.head_dim % 8 == 0;
  a.skip_newest = p.skip_newest;
  a.wave = launch.device->multiprocessors * kRowBlocks;
  a.prepare_block = -1;
  return a;
}

template <typename T, RowKind kKind, int kColumns>
void launch_columns(const RowScanArgs& a, const dim3& grid, const Launch& launch) {
  const int blocks = (a.elements + kBlockElements - 1) / kBlockElements;
  const std::size_t shared =
      static_cast<std::size_t>(blocks) * 2 * kColumns * kWarp * sizeof(uint4);
  const auto kernel = row_scan_kernel<T, kKind, kColumns>;
  launch_early("row scan", kernel, grid, kQueryThreads, shared, launch, a);
}

template <typename T, RowKind kKind>
void launch_kind(const RowScanArgs& a, const dim3& grid, const Launch& launch) {
  if (a.queries.count <= 8) {
    launch_columns<T, kKind, 1>(a, grid, launch);
  } else {
    launch_columns<T, kKind, 2>(a, grid, launch);
  }
}

// So many blocks of every head.
template <RowKind kKind>
void launch_even(const ScanPass& pass, const RowScanArgs& a, int blocks, const Launch& launch) {
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(a.kv_heads),
                  static_cast<unsigned>(a.token_count));
  dispatch_rows(pass.estimate->shape.rows.element,
                [&](auto row) { launch_kind<decltype(row), kKind>(a, grid, launch); });
}

// For heads of up to so many units. A block more of every head, since parts are rounded up.
dim3 shared_grid(const RowScanArgs& a, std::int64_t units) {
  const std::int64_t heads = std::int64_t{a.token_count} * a.kv_heads;
  return dim3(static_cast<unsigned>(shared_blocks(units * heads, std::int64_t{a.wave}) + heads));
}

}  // namespace

void scan_rows(const ScanPass& pass, const PrepareArgs* prepare, const Launch& launch) {
  RowScanArgs a = common_args(pass, launch);
  // A page keeps one block busy. Of few heads a second one is sooner ready with the queries.
  int blocks = a.scan_blocks = 1;
  if (prepare != nullptr) {
    a.prepare = *prepare;
    a.prepare_block = 0;
    const int twice = (blocks + 1) * a.kv_heads * a.token_count;
    if (twice <= launch.device->multiprocessors) a.prepare_block = blocks++;
  }
  launch_even<RowKind::newest>(pass, a, blocks, launch);
}

void scan_all_rows(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  const RowScanArgs a = common_args(pass, launch);
  const dim3 grid = shared_grid(a, most_pages(p.batch) + 1);
  dispatch_rows(p.shape.rows.element,
                [&](auto row) { launch_kind<decltype(row), RowKind::all>(a, grid, launch); });
}

void scan_candidate_rows(const ScanPass& pass, const Launch& launch) {
  RowScanArgs a = common_args(pass, launch);
  const std::int64_t heads = std::int64_t{a.token_count} * a.kv_heads;
  const std::int64_t units = (a.position_capacity + kUnitRows - 1) / kUnitRows;
  if (units == 0) return;
  const std::int64_t wave = (a.wave + heads - 1) / heads;
  a.scan_blocks = static_cast<int>(shared_blocks(units, wave));
  launch_even<RowKind::candidates>(pass, a, a.scan_blocks, launch);
}

void scan_bounds(const ScanPass& pass, const Launch& launch) {
  const EstimateParams& p = *pass.estimate;
  RowScanArgs a = common_args(pass, launch);
  const int d = p.shape.head_dim;
  a.bounds = p.index.bounds.bounds;
  a.slots = p.index.bounds.slots;
  a.row_bytes = 2 * d * static_cast<std::int64_t>(sizeof(std::uint16_t));
  a.elements = 2 * d;
  a.wide = d % 4 == 0;
  const std::int64_t rows = most_pages(p.batch) * kBoundsPerPage;
  const dim3 grid = shared_grid(a, (rows + kUnitRows - 1) / kUnitRows);
  launch_kind<__half, RowKind::bounds>(a, grid, launch);
}

}  // namespace sluice::cuda
