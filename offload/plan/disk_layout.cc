#include "offload/plan/disk_layout.h"

#include <algorithm>
#include <numeric>

#include "io/disk.h"
#include "lib/backend/index_ops.h"
#include "lib/backend/row_cache.h"
#include "lib/bytes.h"
#include "offload/plan/planner.h"

namespace sluice {
namespace {

// The least that holds whole sectors and whole rows, if a page is a multiple of it; else a page.
std::uint64_t unit_of(std::uint64_t row_bytes, std::uint64_t page_bytes) {
  const std::uint64_t unit = std::lcm(row_bytes, std::uint64_t{kSectorBytes});
  return page_bytes % unit == 0 ? unit : page_bytes;
}

}  // namespace

DiskLayout::DiskLayout(const KvPlan& plan)
    : shape(plan.shape),
      page_bytes(round_up(kPageTokens * shape.row_bytes(), kSectorBytes)),
      unit_bytes(unit_of(shape.row_bytes(), page_bytes)),
      region_bytes(static_cast<std::uint64_t>(plan.blocks) * page_bytes),
      regions(static_cast<std::uint64_t>(shape.layers) *
              static_cast<std::uint64_t>(shape.kv_heads)),
      first_in_host(plan.resident_tokens / kPageTokens),
      blocks_in_host(plan.host_blocks) {}

std::uint64_t DiskLayout::stored(std::uint64_t address) const {
  const std::uint64_t region = address / region_bytes;
  std::uint64_t position = address % region_bytes;
  if (position >= static_cast<std::uint64_t>(first_in_host) * page_bytes) {
    position -= static_cast<std::uint64_t>(blocks_in_host) * page_bytes;
  }
  return region * stored_region_bytes() + position;
}

PageStoreConfig DiskLayout::store() const {
  PageStoreConfig config;
  config.regions = regions;
  config.region_bytes = stored_region_bytes();
  config.stripe_bytes = page_bytes;
  return config;
}

std::int64_t tokens_on_disk(const KvPlan& plan) {
  if (!plan.on_disk) return 0;
  const std::int64_t above = plan.resident_tokens + plan.host_blocks * kPageTokens;
  return std::max<std::int64_t>(0, plan.context - above);
}

int fetches_at_once(const KvPlan& plan) { return plan.chooses_early ? 2 : 1; }

// As many as a disk has in flight, and some to follow.
std::int64_t units_at_once(const KvPlan& plan) {
  return std::min<std::int64_t>(1024,
                                plan.placed_rows / fetches_at_once(plan) * plan.shape.kv_heads);
}

std::int64_t stream_pages(const KvPlan& plan) {
  return (plan.stream_tokens + kPageTokens - 1) / kPageTokens;
}

// With fewer a disk waits for requests; no more than are read at a time, which the caps allow.
std::int64_t written_pages(const KvPlan& plan) {
  return std::min<std::int64_t>(8, stream_pages(plan));
}

DiskHostBytes::DiskHostBytes(const KvPlan& plan) {
  const DiskLayout layout(plan);
  const auto heads = static_cast<std::uint64_t>(plan.shape.kv_heads);
  const auto cached = static_cast<std::uint64_t>(plan.host_cache_rows);
  const auto placed = static_cast<std::uint64_t>(plan.placed_rows);
  // Buffers are aligned to less than a sector.
  streamed = kHalves * heads * static_cast<std::uint64_t>(stream_pages(plan)) * layout.page_bytes +
             kSectorBytes;
  written = kHalves * heads * static_cast<std::uint64_t>(written_pages(plan)) * layout.page_bytes +
            kSectorBytes;
  pages = layout.regions * host_region_bytes(plan.shape, plan.host_blocks * kPageTokens);
  if (placed > 0) {
    const auto fetches = static_cast<std::uint64_t>(fetches_at_once(plan));
    units = fetches * static_cast<std::uint64_t>(units_at_once(plan)) * layout.unit_bytes +
            kSectorBytes;
    rows = heads * (cached + placed) * plan.shape.row_bytes();
    tags = heads * cached * (sizeof(RowCacheView::Tag) + sizeof(std::int32_t));
    places =
        heads * (placed * sizeof(PlacedRow) +
                 fetches * static_cast<std::uint64_t>(plan.decode_batch) * sizeof(HeadSelection));
  }
  PageStoreConfig config = layout.store();
  config.directories.resize(static_cast<std::size_t>(plan.disk_directories));
  store = PageStore::memory_bytes(config);
}

}  // namespace sluice
