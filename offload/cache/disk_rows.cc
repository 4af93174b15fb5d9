#include "offload/cache/disk_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "lib/check.h"
#include "lib/current_error.h"

namespace sluice {
namespace {

constexpr std::int32_t kRows = kPageTokens;

}  // namespace

DiskRows::DiskRows(Queue& queue, const KvPlan& plan, DiskPages& pages)
    : queue_(&queue),
      pages_(&pages),
      shape_(plan.shape),
      blocks_(plan.blocks),
      placed_rows_(plan.placed_rows),
      units_at_once_(static_cast<std::size_t>(units_at_once(plan))),
      fetches_(static_cast<std::size_t>(fetches_at_once(plan))) {
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

DiskRows::~DiskRows() {
  fetches_.clear();  // waits
  pages_->keep(std::move(units_));
}

std::int64_t DiskRows::head_stride() const {
  return (view_.ways() + placed_rows_) * static_cast<std::int64_t>(shape_.row_bytes());
}

std::byte* DiskRows::row_at(std::int64_t head, std::int64_t number) const {
  return rows_.data() + head * head_stride() +
         number * static_cast<std::int64_t>(shape_.row_bytes());
}

// A fetch that was not ended, because its step was given up, leaves ways that were taken and not
// filled.
void DiskRows::begin_step() {
  const std::lock_guard lock(mutex_);
  const auto is_open = [](const Fetch& fetch) { return fetch.is_open; };
  const bool gave_up = std::any_of(fetches_.begin(), fetches_.end(), is_open);
  for (Fetch& fetch : fetches_) fetch = Fetch();
  if (++clock_ == RowCacheView::kMostClock || gave_up) {
    forget_rows(0, blocks_);
    if (clock_ == RowCacheView::kMostClock) clock_ = 1;
  }
  std::fill(reads_.begin(), reads_.end(), Traffic());
  std::fill(errors_.begin(), errors_.end(), std::nullopt);
}

// Recorded steps of different numbers of tokens are launched in turns, so each has its own calls.
DiskRows::Calls& DiskRows::calls_of(const FetchWave& wave) {
  std::unique_ptr<Calls>& calls = calls_[{wave.layer, wave.first, wave.tokens}];
  if (calls == nullptr) {
    calls = std::make_unique<Calls>(
        Calls{{*this, wave, &DiskRows::begin}, {*this, wave, &DiskRows::end}});
  }
  return *calls;
}

PlacedRow* DiskRows::places_of(const FetchWave& wave) const {
  const std::size_t part = places_.bytes() / fetches_.size();
  return reinterpret_cast<PlacedRow*>(places_.data() + half_of(wave.layer) * part);
}

std::size_t DiskRows::place_bytes(const FetchWave& wave) const {
  return static_cast<std::size_t>(wave.tokens * shape_.kv_heads * wave.capacity) *
         sizeof(PlacedRow);
}

std::byte* DiskRows::units_of(const FetchWave& wave) const {
  return first_sector(units_) + half_of(wave.layer) * units_at_once_ * pages_->layout().unit_bytes;
}

void DiskRows::begin_fetch(const FetchWave& wave) {
  auto* const places = reinterpret_cast<std::byte*>(places_of(wave));
  const auto items = static_cast<std::size_t>(wave.tokens * shape_.kv_heads);
  const std::size_t bytes = place_bytes(wave);
  const std::vector<CopyOp> down = {
      {places, reinterpret_cast<const std::byte*>(wave.places), bytes},
      {places + bytes, reinterpret_cast<const std::byte*>(wave.heads),
       items * sizeof(HeadSelection)}};
  queue_->copy(down);
  queue_->call_host(calls_of(wave).begin);
}

void DiskRows::end_fetch(const FetchWave& wave) {
  queue_->call_host(calls_of(wave).end);
  const CopyOp up = {reinterpret_cast<std::byte*>(wave.places),
                     reinterpret_cast<const std::byte*>(places_of(wave)), place_bytes(wave)};
  queue_->copy({&up, 1});
}

void DiskRows::run(const FetchWave& wave, Part part) noexcept {
  try {
    (this->*part)(wave);
  } catch (...) {
    const Error error = current_error();
    const std::lock_guard lock(mutex_);
    give_up(wave, error);
  }
}

void DiskRows::give_up(const FetchWave& wave, const Error& error) {
  forget_rows(0, blocks_);  // ways that were taken and not filled
  fetch_of(wave) = Fetch();
  // Numbers on disk are no rows of the host's, and attention reads before the error is seen.
  const std::int64_t places = wave.tokens * shape_.kv_heads * wave.capacity;
  for (std::int64_t i = 0; i < places; ++i) {
    PlacedRow& at = places_of(wave)[i];
    if (!at.is_cached() && !at.is_on_device()) at.number = 0;
  }
  std::fill(errors_.begin(), errors_.end(), error);
}

void DiskRows::begin(const FetchWave& wave) {
  const std::lock_guard lock(mutex_);
  Fetch& fetch = fetch_of(wave);
  fetch = Fetch();
  fetch.is_open = true;
  for (auto& found : found_) found.clear();
  std::fill(spare_used_.begin(), spare_used_.end(), 0);
  place_all(wave);
  if (!fetch.misses.empty()) {
    pages_->wait_for_writes(wave.layer);
    // In the order of their addresses, so that neighbours are read together.
    std::sort(fetch.misses.begin(), fetch.misses.end(), [](const Miss& a, const Miss& b) {
      return std::pair(a.unit, a.offset) < std::pair(b.unit, b.offset);
    });
    begin_read(wave);
  }
  // While the disk reads.
  for (const HostRow& row : fetch.in_host) std::memcpy(row.to, row.from, shape_.row_bytes());
}

void DiskRows::end(const FetchWave& wave) {
  while (fetch_of(wave).ticket) end_read(wave);
  const std::lock_guard lock(mutex_);
  fetch_of(wave).is_open = false;
}

void DiskRows::place_all(const FetchWave& wave) {
  const std::int64_t items = wave.tokens * shape_.kv_heads;
  PlacedRow* const places = places_of(wave);
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
    fetch_of(wave).sharers.push_back({head, row, token});
    return at->second;
  }
  if (pages_->is_in_host(wave.layer, row / kRows)) {
    const std::int64_t number = take_spare(wave, head);
    const RowRun from = {.count = 1, .number = row};
    fetch_of(wave).in_host.push_back(
        {pages_->host_row(wave.layer, static_cast<int>(head), from), row_at(head, number)});
    return at->second = static_cast<std::int32_t>(number);
  }
  const RowCacheView::Tag tag = view_.tag(wave.layer, row);
  if (const std::int64_t way = find_way(head, tag); way >= 0) {
    return at->second = static_cast<std::int32_t>(way);
  }
  Miss miss;
  miss.way = take_way(head, tag);
  const std::int64_t number = miss.way < 0 ? take_spare(wave, head) : miss.way;
  const DiskLayout& layout = pages_->layout();
  const std::uint64_t offset = static_cast<std::uint64_t>(row % kRows) * shape_.row_bytes();
  miss.unit = layout.address(wave.layer, static_cast<int>(head), row / kRows) +
              offset / layout.unit_bytes * layout.unit_bytes;
  miss.offset = offset % layout.unit_bytes;
  miss.to = row_at(head, number);
  miss.head = head;
  miss.row = row;
  miss.token = token;
  fetch_of(wave).misses.push_back(miss);
  return at->second = static_cast<std::int32_t>(number);
}

// A row behind the cache.
std::int64_t DiskRows::take_spare(const FetchWave& wave, std::int64_t head) {
  const std::int64_t spare = placed_rows_ / std::ssize(fetches_);
  return view_.ways() + static_cast<std::int64_t>(half_of(wave.layer)) * spare +
         spare_used_[static_cast<std::size_t>(head)]++;
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

// Begins to read the next units, as many as there is room for.
void DiskRows::begin_read(const FetchWave& wave) {
  Fetch& fetch = fetch_of(wave);
  const std::uint64_t bytes = pages_->layout().unit_bytes;
  std::vector<PageRead> reads;
  std::uint64_t last = 0;  // unit
  fetch.unit_of.clear();
  fetch.first = fetch.end;
  for (; fetch.end < fetch.misses.size(); ++fetch.end) {
    const Miss& miss = fetch.misses[fetch.end];
    if (reads.empty() || last != miss.unit) {
      if (reads.size() == units_at_once_) break;
      last = miss.unit;
      reads.push_back(pages_->read_of(last, {units_of(wave) + reads.size() * bytes, bytes}));
      reads_of(wave.layer, miss.token).bytes += bytes;
    }
    ++reads_of(wave.layer, miss.token).rows;
    fetch.unit_of.push_back(reads.size() - 1);
  }
  fetch.ticket.reset();
  if (!reads.empty()) fetch.ticket.emplace(pages_->store().read(reads, DiskPriority::urgent));
}

// Waits for the units that are being read, puts their rows in place and begins to read the next.
// The lock is not held while waiting, because another fetch may begin meanwhile.
void DiskRows::end_read(const FetchWave& wave) {
  Fetch& fetch = fetch_of(wave);
  const std::vector<DiskFailure> failures = fetch.ticket->failures();
  const std::lock_guard lock(mutex_);
  const std::uint64_t bytes = pages_->layout().unit_bytes;
  std::vector<const Error*> failed(units_at_once_, nullptr);
  for (const DiskFailure& failure : failures) failed[failure.request] = &failure.error;
  for (std::size_t i = fetch.first; i < fetch.end; ++i) {
    const Miss& miss = fetch.misses[i];
    const std::size_t unit = fetch.unit_of[i - fetch.first];
    if (failed[unit] != nullptr) {
      fail(fetch, miss, *failed[unit]);
    } else {
      std::memcpy(miss.to, units_of(wave) + unit * bytes + miss.offset, shape_.row_bytes());
    }
  }
  begin_read(wave);
}

// Rows that could not be read are zero and not cached; the steps of their tokens fail.
void DiskRows::fail(const Fetch& fetch, const Miss& miss, const Error& error) {
  std::memset(miss.to, 0, shape_.row_bytes());
  if (miss.way >= 0) {
    view_.tags[entry(miss.head, miss.way)] = RowCacheView::kNothing;
    view_.heat[entry(miss.head, miss.way)] = RowCacheView::kCold;
  }
  fail(miss.token, error);
  for (const Sharer& sharer : fetch.sharers) {
    if (sharer.head == miss.head && sharer.row == miss.row) fail(sharer.token, error);
  }
}

void DiskRows::fail(std::int64_t token, const Error& error) {
  std::optional<Error>& first = errors_[static_cast<std::size_t>(token)];
  if (first) return;
  const std::string write = pages_->failure();
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
  const std::lock_guard lock(mutex_);
  forget_rows(first_block, blocks);
}

void DiskRows::forget_rows(std::int64_t first_block, std::int64_t blocks) {
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
