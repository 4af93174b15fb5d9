#include "offload/step/token_run.h"

#include <algorithm>

#include "lib/check.h"

namespace sluice {
namespace {

// Least bytes per KV head for which a copy on the other queue is worth its launch.
constexpr std::size_t kLaterBytes = 64 << 10;

// The rows of a run from `first` on; none if it ends before.
RowRun rows_from(const RowRun& run, std::int64_t first) {
  return run.part(std::clamp(first, run.first, run.end()), run.end());
}

// Streamed runs begin with a page, because a disk reads whole ones.
RowRun rows_from_page(const RowRun& run, std::int64_t first) {
  return rows_from(run, first / kPageTokens * kPageTokens);
}

}  // namespace

void TokenRun::begin(std::int32_t sequence, const StepRange& range,
                     const std::vector<std::int32_t>& begun) {
  sequence_ = sequence;
  range_ = range;
  begun_ = begun;
  places_.assign(static_cast<std::size_t>(pool_->plan().sets()), std::nullopt);
  written_.assign(static_cast<std::size_t>(pool_->plan().shape.layers), {});
}

void TokenRun::begin_rows(std::int32_t sequence, int layer, const StepRange& rows,
                          const std::vector<std::int32_t>& begun) {
  begin(sequence, rows, begun);
  const int set = pool_->set_of(layer);
  places_[static_cast<std::size_t>(set)] = place(set, rows);
}

// Places are computed per set on first use: a sparse prefill begins a run for every layer and needs
// one set only.
const TokenRun::Places& TokenRun::of(int layer) {
  const int set = pool_->set_of(layer);
  std::optional<Places>& places = places_[static_cast<std::size_t>(set)];
  if (!places) {
    places = place(set, {pool_->tables().rows(sequence_, range_.first, set), range_.tokens});
  }
  return *places;
}

TokenRun::Places TokenRun::place(int set, const StepRange& rows) const {
  Places places;
  places.range = rows;
  places.host = host_runs(pool_->tables(), sequence_, rows.first, rows.end(), set);
  if (!begun_.empty()) places.begun = begun_[static_cast<std::size_t>(set)];
  place_new_rows(set, places);
  for (const RowRun& run :
       nearest_runs(pool_->tables(), sequence_, 0, places.own.front().first, set)) {
    const bool resident = run.place == RowPlace::device || pool_->plan().in_place;
    (resident ? places.resident : places.streamed).push_back(run);
  }
  return places;
}

// New rows are written to their final place if all their pages are resident there; else they are
// attended in the window.
void TokenRun::place_new_rows(int set, Places& places) const {
  const StepRange& range = places.range;
  const std::int64_t page_first = range.first / kPageTokens * kPageTokens;
  places.own = nearest_runs(pool_->tables(), sequence_, page_first, range.end(), set);
  const bool direct = pool_->plan().in_place ||
                      std::all_of(places.own.begin(), places.own.end(),
                                  [](const RowRun& run) { return run.place == RowPlace::device; });
  if (direct) return;
  // An index needs whole pages, and with one the window has room for the page's earlier rows.
  // Without an index those are attended where they lie.
  if (pool_->plan().tails) places.front = range.first - page_first;
  places.fetches_front = places.front > 0 && places.begun == PageSlots::kNone;
  const std::int64_t first = range.first - places.front;
  check(range.end() - first <= pool_->plan().window_tokens, "more rows than the window holds");
  places.own = {{RowPlace::window, first, range.end() - first, 0}};
}

// Copies the first page's earlier rows in front of the new ones.
void TokenRun::copy_front(int layer) {
  const Places& places = of(layer);
  const std::int64_t front = places.front;
  if (front == 0) return;
  const KvShape& shape = pool_->plan().shape;
  const std::int64_t first = places.range.first;
  const RowRun host =
      host_runs(pool_->tables(), sequence_, first - front, first, pool_->set_of(layer)).front();
  const RowRun from = places.fetches_front ? host
                                           : RowRun{RowPlace::device, host.first, front,
                                                    places.begun * std::int64_t{kPageTokens}};
  const std::size_t bytes = static_cast<std::size_t>(front) * shape.row_bytes();
  std::vector<CopyOp> ops;
  for (int head = 0; head < shape.kv_heads; ++head) {
    ops.push_back({pool_->window(head), pool_->row(layer, head, from), bytes});
  }
  pool_->queue().copy(ops);
}

void TokenRun::append(int layer, const NewRows& rows, bool indexed) {
  pool_->settle();
  copy_front(layer);
  const std::vector<RowRun>& own = of(layer).own;
  const StepRange& range = of(layer).range;
  for (const RowRun& run : own) {
    if (pool_->disk() != nullptr) {
      append_piece(layer, rows, run.part(std::max(run.first, range.first), run.end()), {});
      continue;
    }
    for (const RowRun& host : of(layer).host) {
      const std::int64_t first = std::max({run.first, host.first, range.first});
      const std::int64_t end = std::min(run.end(), host.end());
      if (first < end) append_piece(layer, rows, run.part(first, end), host.part(first, end));
    }
  }
  copy_window(layer);
  build_index(layer, indexed);
  if (pool_->disk() != nullptr) write_pages(layer);
  if (!indexed) return;
  for (const RowRun& run : own) {
    const std::int64_t first = std::max(run.first, range.first);
    if (first >= run.end()) continue;
    pool_->sparse()->index().add_values(layer, sequence_,
                                        pool_->spans(layer, run.part(first, run.end())), false);
  }
}

// Copies rows that are ready to `heads`, the places of the run `to`.
void TokenRun::copy_ready(int layer, std::span<const RowSpan> ready, const RowRun& to,
                          std::span<std::byte* const> heads) {
  const std::size_t row_bytes = pool_->plan().shape.row_bytes();
  const std::size_t offset = static_cast<std::size_t>(to.first - of(layer).range.first) * row_bytes;
  std::vector<CopyOp> ops;
  for (std::size_t head = 0; head < heads.size(); ++head) {
    ops.push_back(
        {heads[head], ready[head].rows + offset, static_cast<std::size_t>(to.count) * row_bytes});
  }
  pool_->queue().copy(ops);
}

// Many rows are copied to host memory on the other queue, beside attention.
void TokenRun::append_piece(int layer, const NewRows& rows, const RowRun& to, const RowRun& host) {
  const KvShape& shape = pool_->plan().shape;
  const std::size_t bytes = static_cast<std::size_t>(to.count) * shape.row_bytes();
  std::vector<std::byte*> heads;
  std::vector<std::byte*> host_heads;
  std::vector<CopyOp> ops;
  for (int head = 0; head < shape.kv_heads; ++head) {
    heads.push_back(pool_->row(layer, head, to));
    if (pool_->plan().in_place || pool_->disk() != nullptr) continue;
    std::byte* const at_host = pool_->row(layer, head, host);
    if (bytes < kLaterBytes && rows.ready.empty()) {
      host_heads.push_back(at_host);
    } else {
      ops.push_back({at_host, heads.back(), bytes});
    }
  }
  if (rows.ready.empty()) {
    const std::int64_t offset = (to.first - of(layer).range.first) * rows.stride;
    pool_->queue().run(AppendParams{rows.k + offset, rows.v + offset, to.count, rows.stride, shape,
                                    heads, host_heads});
  } else {
    copy_ready(layer, rows.ready, to, heads);
  }
  if (!ops.empty()) pool_->send_to_host(ops);
}

// Copies rows from the window to pages that are resident on the device.
void TokenRun::copy_window(int layer) {
  const RowRun& window = of(layer).own.front();
  if (window.place != RowPlace::window) return;
  const KvShape& shape = pool_->plan().shape;
  std::vector<CopyOp> ops;
  for (const RowRun& run :
       nearest_runs(pool_->tables(), sequence_, window.first, window.end(), pool_->set_of(layer))) {
    if (run.place != RowPlace::device) continue;
    const std::size_t bytes = static_cast<std::size_t>(run.count) * shape.row_bytes();
    for (int head = 0; head < shape.kv_heads; ++head) {
      ops.push_back({pool_->row(layer, head, run),
                     pool_->row(layer, head, window.part(run.first, run.end())), bytes});
    }
  }
  if (!ops.empty()) pool_->queue().copy(ops);
}

// Writes the pages that are complete now and not resident.
void TokenRun::write_pages(int layer) {
  const RowRun& window = of(layer).own.front();
  if (window.place != RowPlace::window) return;
  const int set = pool_->set_of(layer);
  std::vector<DevicePage> pages;
  for (std::int64_t page = window.first / kPageTokens; (page + 1) * kPageTokens <= window.end();
       ++page) {
    const PageSlots slots = pool_->tables().page(sequence_, page, set);
    if (slots.device != PageSlots::kNone) continue;
    const RowRun rows = window.part(page * kPageTokens, (page + 1) * kPageTokens);
    pages.push_back({slots.host, pool_->row(layer, 0, rows), pool_->window(1) - pool_->window(0)});
  }
  if (pages.empty()) return;
  pool_->disk()->wait_for(pool_->queue());
  KvPool::Written& written = written_[static_cast<std::size_t>(layer)];
  written.rows = std::ssize(pages) * kPageTokens;
  written.to_disk = pool_->disk()->write(layer, pages) * kPageTokens;
}

void TokenRun::build_index(int layer, bool indexed) {
  ListedPages* const listed = pool_->listed();
  if (!indexed && listed == nullptr) return;
  const std::int64_t whole = of(layer).range.end() / kPageTokens * kPageTokens;
  for (const RowRun& run : of(layer).own) {
    const std::int64_t end = std::min(run.end(), whole);
    if (run.first >= end) continue;
    check(run.first % kPageTokens == 0, "an index of a page of which a part is elsewhere");
    const std::vector<RowSpan> rows = pool_->spans(layer, run.part(run.first, end));
    const std::int64_t first_page = run.first / kPageTokens;
    const std::int64_t pages = (end - run.first) / kPageTokens;
    if (indexed) pool_->sparse()->index().build(layer, sequence_, first_page, pages, rows);
    if (listed != nullptr) listed->build(layer, run_of(sequence_, first_page, pages, rows));
  }
}

std::int64_t TokenRun::hits(int layer) {
  std::int64_t rows = 0;
  for (const RowRun& run : of(layer).own) rows += rows_from(run, first_row(layer)).count;
  for (const RowRun& run : of(layer).resident) rows += rows_from(run, first_row(layer)).count;
  return rows;
}

std::int64_t TokenRun::misses(int layer) {
  std::int64_t rows = 0;
  for (const RowRun& run : of(layer).streamed) rows += rows_from_page(run, first_row(layer)).count;
  return rows;
}

std::int64_t TokenRun::misses_on_disk(int layer) {
  const std::int64_t first = first_row(layer) / kPageTokens * kPageTokens;
  const std::int64_t end = of(layer).own.front().first;
  return first < end ? pool_->rows_on_disk(layer, sequence_, first, end) : 0;
}

void TokenRun::attend_run(int layer, AttendParams& params, const RowRun& run) {
  if (run.count == 0) return;
  const std::vector<RowSpan> rows = pool_->spans(layer, run);
  params.rows = rows;
  params.first_row_position = run.first;
  pool_->queue().run(params);
  params.rows = {};
  params.merge = true;
}

std::int64_t TokenRun::hits_among(int layer, std::span<const std::uint32_t> listed) {
  std::int64_t rows = 0;
  const auto add = [&](const RowRun& run) {
    for (std::int64_t at = run.first; at < run.end();) {
      const std::int64_t page = at / kPageTokens;
      const std::int64_t next = std::min(run.end(), (page + 1) * kPageTokens);
      if (listed[static_cast<std::size_t>(page)] != 0) rows += next - at;
      at = next;
    }
  };
  for (const RowRun& run : of(layer).own) add(run);
  for (const RowRun& run : of(layer).resident) add(run);
  return rows;
}

// Rows that the first page held already are fetched if they are no longer on the device.
void TokenRun::record_appended(int layer, Ledger& ledger) {
  const std::int64_t fetched = of(layer).fetches_front ? of(layer).front : 0;
  ledger.record(layer, Tier::host, Tier::device, Cause::miss,
                traffic_of(pool_->plan().shape, fetched));
  pool_->record_written(layer, written_[static_cast<std::size_t>(layer)], ledger);
}

void TokenRun::attend(int layer, const Queries& queries, double share) {
  const StepRange& range = of(layer).range;
  AttendParams params = attend_params(pool_->plan().shape, range, queries);
  params.window = pool_->plan().window(layer);
  const std::int64_t first = first_row(layer);
  if (share < 1.0) {
    params.listed = pool_->listed()->choose(layer, sequence_, range, queries, share);
  }
  for (const RowRun& run : of(layer).own) attend_run(layer, params, rows_from(run, first));
  for (const RowRun& run : of(layer).resident) attend_run(layer, params, rows_from(run, first));
  attend_streamed(layer, params);
  pool_->settle();
}

// The rows that stream, in parts that fit the buffer and lie in one place.
std::vector<RowRun> TokenRun::pieces(int layer) {
  const std::int64_t most = pool_->plan().stream_tokens;
  std::vector<RowRun> pieces;
  for (const RowRun& whole : of(layer).streamed) {
    RowRun rest = rows_from_page(whole, first_row(layer));
    while (rest.count > 0) {
      const RowRun next = rest.part(rest.first, std::min(rest.end(), rest.first + most));
      pieces.push_back(pool_->disk() == nullptr ? next : pool_->disk()->first_part(layer, next));
      rest = rest.part(pieces.back().end(), rest.end());
    }
  }
  return pieces;
}

void TokenRun::attend_streamed(int layer, AttendParams& params) {
  const std::vector<RowRun> pieces = this->pieces(layer);
  const KvShape& shape = pool_->plan().shape;
  Queue& queue = pool_->queue();
  Queue& transfer = pool_->transfer();
  DiskPages* const disk = pool_->disk();
  const auto is_on_disk = [&](std::size_t number) {
    return disk != nullptr && !disk->is_in_host(layer, pieces[number].number / kPageTokens);
  };
  const auto read = [&](std::size_t number) {
    if (number >= pieces.size() || !is_on_disk(number)) return;
    // The half's previous rows have to be on the device, those of an earlier layer or session, too.
    if (number != 1 || !is_on_disk(0)) transfer.synchronize();  // that for piece 0 covers both
    disk->begin_read(number % 2, layer, pieces[number]);
  };
  const auto fetch = [&](std::size_t number) {
    if (number >= pieces.size()) return;
    if (is_on_disk(number)) disk->end_read(number % 2);
    // Waits until attention has finished with the buffer's previous rows.
    transfer.wait_for(queue);
    const auto to = [&](int head) { return pool_->stream(number % 2, head); };
    if (is_on_disk(number)) {
      transfer.copy(disk->copies(number % 2, pieces[number], to));
    } else {
      std::vector<CopyOp> ops;
      for (int head = 0; head < shape.kv_heads; ++head) {
        const std::byte* const from = disk == nullptr ? pool_->row(layer, head, pieces[number])
                                                      : disk->host_row(layer, head, pieces[number]);
        ops.push_back(
            {to(head), from, static_cast<std::size_t>(pieces[number].count) * shape.row_bytes()});
      }
      transfer.copy(ops);
    }
    read(number + 1);
  };
  read(0);
  fetch(0);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    queue.wait_for(transfer);
    fetch(i + 1);
    std::vector<RowSpan> rows;
    for (int head = 0; head < shape.kv_heads; ++head) {
      rows.push_back({pool_->stream(i % 2, head), pieces[i].count});
    }
    params.rows = rows;
    params.first_row_position = pieces[i].first;
    queue.run(params);
    params.merge = true;
  }
  params.rows = {};
}

}  // namespace sluice
