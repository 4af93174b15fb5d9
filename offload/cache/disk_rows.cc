#include "offload/cache/disk_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "lib/check.h"

namespace sluice {
namespace {

constexpr std::int32_t kRows = kPageTokens;

}  // namespace

DiskRows::DiskRows(Queue& queue, const KvPlan& plan, DiskPages& pages)
    : queue_(&queue),
      pages_(&pages),
      shape_(plan.shape),
      blocks_(plan.blocks),
      spare_rows_(plan.placed_rows),
      units_at_once_(static_cast<std::size_t>(units_at_once(plan))) {
  Backend& backend = queue.backend();
  const DiskHostBytes bytes(plan);
  rows_ = backend.allocate(Tier::host, bytes.rows);
  tags_ = backend.allocate(Tier::host, bytes.tags);
  places_ = backend.allocate(Tier::host, bytes.places);
  units_ = backend.allocate(Tier::host, bytes.units);
  view_.sets = plan.host_cache_rows / RowCacheView::kWays;
  view_.host_rows = plan.blocks * kPageTokens;
  view_.tags = reinterpret_cast<RowCacheView::Tag*>(tags_.data());
  const std::int64_t ways = shape_.kv_heads * view_.ways();
  view_.heat = reinterpret_cast<std::int32_t*>(view_.tags + ways);
  std::fill_n(view_.tags, ways, RowCacheView::kNothing);
  std::fill_n(view_.heat, ways, RowCacheView::kCold);
  const auto heads = static_cast<std::size_t>(shape_.kv_heads);
  found_.resize(heads);
  spare_used_.resize(heads);
  reads_.resize(static_cast<std::size_t>(shape_.layers * plan.decode_batch));
  errors_.resize(static_cast<std::size_t>(plan.decode_batch));
}

std::int64_t DiskRows::head_stride() const {
  return (view_.ways() + spare_rows_) * static_cast<std::int64_t>(shape_.row_bytes());
}

std::byte* DiskRows::row_at(std::int64_t head, std::int64_t number) const {
  return rows_.data() + head * head_stride() +
         number * static_cast<std::int64_t>(shape_.row_bytes());
}

void DiskRows::begin_step() {
  if (++clock_ == RowCacheView::kMostClock) {
    forget(0, blocks_);
    clock_ = 1;
  }
  std::fill(reads_.begin(), reads_.end(), Traffic());
  std::fill(errors_.begin(), errors_.end(), std::nullopt);
}

void DiskRows::fetch(const FetchWave& wave) {
  // Recorded steps of different numbers of tokens are launched in turns, so each has its own call.
  std::unique_ptr<Call>& call = calls_[{wave.layer, wave.first, wave.tokens}];
  if (call == nullptr) call = std::make_unique<Call>(*this, wave);
  auto* const places = places_.data();
  const auto items = static_cast<std::size_t>(wave.tokens * shape_.kv_heads);
  const std::size_t place_bytes =
      items * static_cast<std::size_t>(wave.capacity) * sizeof(PlacedRow);
  auto* const of_backend = reinterpret_cast<std::byte*>(wave.places);
  const std::vector<CopyOp> down = {
      {places, of_backend, place_bytes},
      {places + place_bytes, reinterpret_cast<const std::byte*>(wave.heads),
       items * sizeof(HeadSelection)}};
  queue_->copy(down);
  queue_->call_host(*call);
  const CopyOp up = {of_backend, places, place_bytes};
  queue_->copy({&up, 1});
}

void DiskRows::run(const FetchWave& wave) noexcept {
  misses_.clear();
  sharers_.clear();
  for (auto& found : found_) found.clear();
  std::fill(spare_used_.begin(), spare_used_.end(), 0);
  try {
    place_all(wave);
    read_all(wave);
  } catch (const std::exception& error) {
    forget(0, blocks_);  // ways that were taken and not filled
    // Numbers on disk are no rows of the host's, and attention reads before the error is seen.
    const std::int64_t places = wave.tokens * shape_.kv_heads * wave.capacity;
    for (std::int64_t i = 0; i < places; ++i) {
      PlacedRow& at = reinterpret_cast<PlacedRow*>(places_.data())[i];
      if (!at.is_cached() && !at.is_on_device()) at.number = 0;
    }
    const Error failed(ErrorCode::internal, error.what());
    for (std::int64_t t = 0; t < wave.tokens; ++t) {
      errors_[static_cast<std::size_t>(wave.first + t)] = failed;
    }
  }
}

void DiskRows::place_all(const FetchWave& wave) {
  const std::int64_t items = wave.tokens * shape_.kv_heads;
  auto* const places = reinterpret_cast<PlacedRow*>(places_.data());
  const auto* const heads = reinterpret_cast<const HeadSelection*>(places + items * wave.capacity);
  for (std::int64_t item = 0; item < items; ++item) {
    const std::int64_t token = wave.first + item / shape_.kv_heads;
    const std::int64_t head = item % shape_.kv_heads;
    PlacedRow* const first = places + item * wave.capacity;
    for (PlacedRow& at : std::span(first, static_cast<std::size_t>(heads[item].count))) {
      if (at.is_cached() || at.is_on_device()) continue;
      at.number = place(wave, token, head, at.number);
    }
  }
}

// The number in rows() of a row on disk, and a note to read it if it has to be.
std::int32_t DiskRows::place(const FetchWave& wave, std::int64_t token, std::int64_t head,
                             std::int32_t row) {
  const auto [at, is_new] = found_[static_cast<std::size_t>(head)].try_emplace(row, 0);
  if (!is_new) {
    sharers_.push_back({head, row, token});
    return at->second;
  }
  const RowCacheView::Tag tag = view_.tag(wave.layer, row);
  if (const std::int64_t way = find_way(head, tag); way >= 0) {
    return at->second = static_cast<std::int32_t>(way);
  }
  Miss miss;
  miss.way = take_way(head, tag);
  std::int64_t number = miss.way;
  if (number < 0) number = view_.ways() + spare_used_[static_cast<std::size_t>(head)]++;
  const DiskLayout& layout = pages_->layout();
  const std::uint64_t offset = static_cast<std::uint64_t>(row % kRows) * shape_.row_bytes();
  miss.unit = layout.address(wave.layer, static_cast<int>(head), row / kRows) +
              offset / layout.unit_bytes * layout.unit_bytes;
  miss.offset = offset % layout.unit_bytes;
  miss.to = row_at(head, number);
  miss.head = head;
  miss.row = row;
  miss.token = token;
  misses_.push_back(miss);
  return at->second = static_cast<std::int32_t>(number);
}

std::int64_t DiskRows::find_way(std::int64_t head, RowCacheView::Tag tag) {
  if (view_.sets == 0) return -1;
  const std::int64_t set = view_.set_of(tag) * RowCacheView::kWays;
  const RowCacheView::Tag* const tags = view_.tags + entry(head, set);
  const RowCacheView::Tag* const found = std::find(tags, tags + RowCacheView::kWays, tag);
  if (found == tags + RowCacheView::kWays) return -1;
  const std::int64_t way = set + (found - tags);
  std::int32_t& heat = view_.heat[entry(head, way)];
  heat = RowCacheView::heated(heat, RowCacheView::heat_of_new(clock_));
  return way;
}

// The coldest way of the tag's set, unless this step has found its row already.
std::int64_t DiskRows::take_way(std::int64_t head, RowCacheView::Tag tag) {
  if (view_.sets == 0) return -1;
  const std::int32_t fresh = RowCacheView::heat_of_new(clock_);
  const std::int64_t set = view_.set_of(tag) * RowCacheView::kWays;
  const std::int32_t* const heat = view_.heat + entry(head, set);
  const std::int64_t coldest = std::min_element(heat, heat + RowCacheView::kWays) - heat;
  if (heat[coldest] >= fresh) return -1;
  const std::int64_t way = set + coldest;
  view_.tags[entry(head, way)] = tag;
  view_.heat[entry(head, way)] = fresh;
  return way;
}

// Units in the order of their addresses, so that neighbours are read together.
void DiskRows::read_all(const FetchWave& wave) {
  if (misses_.empty()) return;
  pages_->wait_for_writes(wave.layer);
  std::sort(misses_.begin(), misses_.end(), [](const Miss& a, const Miss& b) {
    return std::pair(a.unit, a.offset) < std::pair(b.unit, b.offset);
  });
  const std::span<const Miss> all = misses_;
  std::size_t first = 0;
  std::size_t units = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const bool is_new = i == first || all[i].unit != all[i - 1].unit;
    if (is_new && units == units_at_once_) {
      read_units(wave.layer, all.subspan(first, i - first));
      first = i;
      units = 0;
    }
    units += is_new ? 1 : 0;
  }
  read_units(wave.layer, all.subspan(first));
}

void DiskRows::read_units(int layer, std::span<const Miss> misses) {
  const std::uint64_t bytes = pages_->layout().unit_bytes;
  std::byte* const units = first_sector(units_);
  std::vector<PageRead> reads;
  std::vector<std::size_t> unit_of;  // by miss
  for (const Miss& miss : misses) {
    if (reads.empty() || reads.back().address != miss.unit) {
      reads.push_back({miss.unit, {units + reads.size() * bytes, bytes}});
      reads_of(layer, miss.token).bytes += bytes;
    }
    ++reads_of(layer, miss.token).rows;
    unit_of.push_back(reads.size() - 1);
  }
  const DiskTicket ticket = pages_->store().read(reads, DiskPriority::urgent);
  std::vector<const Error*> failed(reads.size(), nullptr);
  const std::vector<DiskFailure> failures = ticket.failures();
  for (const DiskFailure& failure : failures) failed[failure.request] = &failure.error;
  for (std::size_t i = 0; i < misses.size(); ++i) {
    const Miss& miss = misses[i];
    if (failed[unit_of[i]] != nullptr) {
      fail(miss, *failed[unit_of[i]]);
    } else {
      std::memcpy(miss.to, units + unit_of[i] * bytes + miss.offset, shape_.row_bytes());
    }
  }
}

// Rows that could not be read are zero and not cached; the steps of their tokens fail.
void DiskRows::fail(const Miss& miss, const Error& error) {
  std::memset(miss.to, 0, shape_.row_bytes());
  if (miss.way >= 0) {
    view_.tags[entry(miss.head, miss.way)] = RowCacheView::kNothing;
    view_.heat[entry(miss.head, miss.way)] = RowCacheView::kCold;
  }
  fail(miss.token, error);
  for (const Sharer& sharer : sharers_) {
    if (sharer.head == miss.head && sharer.row == miss.row) fail(sharer.token, error);
  }
}

void DiskRows::fail(std::int64_t token, const Error& error) {
  std::optional<Error>& first = errors_[static_cast<std::size_t>(token)];
  if (first) return;
  const std::string& write = pages_->failure();
  first.emplace(error.code(), write.empty() ? error.what()
                                            : std::string(error.what()) +
                                                  "; before it, a write failed: " + write);
}

Traffic& DiskRows::reads_of(int layer, std::int64_t token) {
  return reads_[static_cast<std::size_t>(layer) * errors_.size() + static_cast<std::size_t>(token)];
}

Traffic DiskRows::read(int layer, std::int64_t token) const {
  return reads_[static_cast<std::size_t>(layer) * errors_.size() + static_cast<std::size_t>(token)];
}

void DiskRows::require_read(std::int64_t token) const {
  const std::optional<Error>& error = errors_[static_cast<std::size_t>(token)];
  if (error) throw Error(*error);
}

void DiskRows::forget(std::int64_t first_block, std::int64_t blocks) {
  const std::int64_t first = first_block * kPageTokens;
  const std::int64_t end = first + blocks * kPageTokens;
  for (std::int64_t at = 0; at < shape_.kv_heads * view_.ways(); ++at) {
    RowCacheView::Tag& tag = view_.tags[at];
    if (tag == RowCacheView::kNothing) continue;
    const std::int64_t row = view_.host_of(tag);
    if (row < first || row >= end) continue;
    tag = RowCacheView::kNothing;
    view_.heat[at] = RowCacheView::kCold;
  }
}

}  // namespace sluice
