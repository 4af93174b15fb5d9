#include "offload/cache/row_cache.h"

#include <algorithm>

namespace sluice {

RowCache::RowCache(Queue& queue, const KvPlan& plan)
    : queue_(&queue),
      shape_(plan.shape),
      sets_(plan.cache_rows / RowCacheView::kWays),
      host_rows_(plan.ragged ? plan.shape.layers * plan.host_rows() : plan.host_rows()),
      placed_rows_(plan.placed_rows),
      takes_turns_(plan.chooses_early),
      ragged_(plan.ragged),
      selectable_(
          static_cast<std::size_t>(plan.ragged ? plan.shape.layers * plan.blocks : plan.blocks)) {
  Backend& backend = queue.backend();
  const RowCacheBytes bytes(plan);
  rows_ = backend.allocate(Tier::device, bytes.rows);
  tags_ = backend.allocate(Tier::device, bytes.tags);
  heat_ = backend.allocate(Tier::device, bytes.heat);
  clock_ = backend.allocate(Tier::device, bytes.clock);
  places_ = backend.allocate(Tier::device, bytes.places);
  clear();
}

RowCacheView RowCache::view() const {
  RowCacheView view;
  view.rows = rows_.data();
  view.tags = reinterpret_cast<RowCacheView::Tag*>(tags_.data());
  view.heat = reinterpret_cast<std::int32_t*>(heat_.data());
  view.sets = sets_;
  view.host_rows = host_rows_;
  view.clock = reinterpret_cast<const std::int32_t*>(clock_.data());
  return view;
}

void RowCache::advance() {
  if (now_ == RowCacheView::kMostClock || filling_ > 0) {
    clear();
    now_ = 0;
    filling_ = 0;
  }
  ++now_;
  const CopyOp op = {clock_.data(), reinterpret_cast<const std::byte*>(&now_), sizeof(now_)};
  queue_->copy({&op, 1});
}

// Consecutive blocks are forgotten together, because each forget scans the whole cache.
void RowCache::write(const BlockTables& tables, std::int32_t sequence, int set, std::int64_t first,
                     std::int64_t end, const ForgetBlocks& also) {
  const auto block_of = [&](std::int64_t page) { return tables.page(sequence, page, set).host; };
  const std::int64_t first_page = first / kPageTokens;
  const std::int64_t last_page = (end - 1) / kPageTokens;
  std::int64_t from = 0;
  std::int64_t count = 0;
  const auto forget_run = [&] {
    if (count == 0) return;
    if (also) also(from, count);
    forget(from, count);
  };
  // If something throws before the end, the next step clears the cache, so stale rows are never
  // found.
  begin_filling();
  for (std::int64_t page = first_page; page <= last_page; ++page) {
    const std::int64_t block = block_of(page);
    if (!selectable_[static_cast<std::size_t>(block)]) continue;
    selectable_[static_cast<std::size_t>(block)] = false;
    if (block != from + count) {
      forget_run();
      from = block;
      count = 0;
    }
    ++count;
  }
  forget_run();
  end_filling();
  for (std::int64_t page = std::max<std::int64_t>(first_page - 1, 0); page < last_page; ++page) {
    selectable_[static_cast<std::size_t>(block_of(page))] = true;
  }
}

void RowCache::forget(std::int64_t first_block, std::int64_t blocks) {
  ForgetRowsParams params;
  params.shape = shape_;
  params.cache = view();
  params.first = first_block * kPageTokens;
  params.count = blocks * kPageTokens;
  queue_->run(params);
}

void RowCache::clear() {
  ForgetRowsParams params;
  params.shape = shape_;
  params.cache = view();
  params.all = true;
  queue_->run(params);
}

}  // namespace sluice
