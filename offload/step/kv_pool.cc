#include "offload/step/kv_pool.h"

#include <algorithm>
#include <utility>

#include "lib/check.h"
#include "offload/plan/planner.h"

namespace sluice {
namespace {

// Sizes of estimates are planned.
void require_planned_for(const Backend& backend, const IndexLayout& layout) {
  const LogitFormat& planned = layout.logits;
  const LogitFormat& own = backend.info().logits;
  check(!layout.selects() ||
            (planned.dtype == own.dtype && planned.digested_from == own.digested_from &&
             planned.digest_page_bytes == own.digest_page_bytes &&
             planned.page_weight_bytes == own.page_weight_bytes),
        "a plan for another kind of backend");
}

BlockLimits limits_of(const KvPlan& plan) {
  check(plan.layout != nullptr, "a plan that plan_kv() has not made");
  const IndexLayout& layout = *plan.layout;
  BlockLimits limits;
  limits.sequences = plan.sequences;
  limits.sequence_pages = layout.pages();
  const std::int64_t of_page = plan.ragged ? plan.shape.layers : 1;  // blocks
  limits.blocks = of_page * plan.blocks;
  limits.tiles = layout.selects() ? layout.all_tiles : 0;
  limits.tile_slots = layout.selects() ? layout.tiles : 0;
  limits.tile_places = layout.parked_tiles();
  limits.ragged_sets = plan.ragged ? plan.shape.layers : 0;
  const bool two_sets = !plan.ragged && plan.sets() > 1;
  limits.resident_blocks.assign(two_sets ? 2 : 1, 0);
  if (plan.in_place) return limits;
  const auto blocks_of = [&](std::int64_t tokens) {
    return of_page * (tokens >= plan.host_rows() ? plan.blocks : tokens / kPageTokens);
  };
  limits.resident_blocks = {blocks_of(plan.resident_tokens)};
  if (two_sets) limits.resident_blocks.push_back(blocks_of(plan.dense_resident_tokens));
  limits.pins_newest = plan.tails;
  limits.reports_lost_slots = plan.on_disk;
  return limits;
}

}  // namespace

KvPool::KvPool(std::shared_ptr<Queue> queue, const KvPlan& plan, std::span<const Policy> policies,
               const Scorers& scorers, const HostAttender& attender, const DiskSource& disk,
               const ValueBasis& basis)
    : queue_(std::move(queue)),
      transfer_(queue_->make_sibling({.computes = false})),
      plan_(plan),
      policies_(policies.begin(), policies.end()),
      tables_(limits_of(plan)),
      uncounted_(static_cast<std::size_t>(plan.shape.layers)) {
  Backend& backend = queue_->backend();
  const IndexLayout& layout = *plan.layout;
  require_planned_for(backend, layout);
  check(plan.all_resident() || plan.stream_tokens > 0,
        "a plan that neither holds nor streams its rows");
  check(!plan.on_disk || plan.tails, "a plan on disk without the newest pages on the device");
  if (policies_.empty()) policies_.emplace_back();
  for (Policy& policy : policies_) policy = within_windows(std::move(policy), plan.windows);
  if (plan.chooses_early) queue_->prepare_branches();
  if (plan.on_disk) {
    disk_ = std::make_unique<DiskPages>(*transfer_, plan, disk);
  } else {
    KvShape regions = plan.shape;
    if (plan.ragged) regions.layers = 1;
    host_ = std::make_unique<HostStore>(backend, regions,
                                        plan.host_rows() * (plan.ragged ? plan.shape.layers : 1));
  }
  std::int64_t before = 0;
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    sets_.push_back(plan_.set_of(layer));
    on_device_.push_back(before);
    if (!plan.ragged) before += plan_.shape.kv_heads * plan_.device_rows(sets_.back());
  }
  const DeviceRowBytes rows(plan);
  device_ = backend.allocate(Tier::device, rows.resident);
  window_ = backend.allocate(Tier::device, rows.window);
  stream_ = backend.allocate(Tier::device, rows.stream);
  pages_ = backend.allocate(tier(), layout.page_table_bytes());
  tiles_ = backend.allocate(tier(), layout.tile_table_bytes());
  tokens_ = backend.allocate(tier(), layout.token_bytes());
  if (plan.cache_rows > 0) cache_ = std::make_unique<RowCache>(*queue_, plan);
  if (layout.selects()) {
    if (plan.on_disk) disk_rows_ = std::make_unique<DiskRows>(*queue_, plan, *disk_);
    sparse_ = std::make_unique<SparseAttention>(
        *queue_, layout, scorers, tier(), SelectedRows{cache_.get(), disk_rows_.get()}, basis);
    sparse_->index().use_table(reinterpret_cast<const std::int32_t*>(tiles_.data()));
    if (tables_.parks_tiles()) {
      parked_ = std::make_unique<ParkedTiles>(backend, sparse_->index(), layout.parked_tiles());
    }
  }
  if (layout.zipvl) {
    important_ = std::make_unique<ImportantTokens>(*queue_, layout, rows, tier());
  }
  if (plan.listed_blocks > 0) listed_ = std::make_unique<ListedPages>(*queue_, plan, tier());
  if (plan.host_attention) {
    check(attender.backend != nullptr, "a plan with attention on the host, and nobody who attends");
    host_attention_ = std::make_unique<HostAttention>(
        *queue_, *transfer_, plan, attender, reinterpret_cast<const PageSlots*>(pages_.data()),
        tokens());
  }
}

KvPool::~KvPool() {
  try {
    if (parked_ != nullptr) queue_->synchronize();  // tiles may be on their way
    if (sends_to_host_) transfer_->synchronize();
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the step that failed has reported
  }
}

void KvPool::send_to_host(std::span<const CopyOp> ops) {
  transfer_->wait_for(*queue_);
  transfer_->copy(ops);
  sends_to_host_ = true;
}

void KvPool::settle() {
  if (!sends_to_host_) return;
  queue_->wait_for(*transfer_);
  sends_to_host_ = false;
}

std::int32_t KvPool::open() {
  const std::int32_t sequence = tables_.open();
  try {
    forget_sums(sequence);
    if (sparse_ != nullptr) sparse_->index().clear_values(sequence);
    if (sparse_ != nullptr) sparse_->index().clear_bad(sequence);
  } catch (...) {
    close(sequence);
    throw;
  }
  return sequence;
}

std::int32_t KvPool::fork(std::int32_t sequence) {
  const std::int32_t child = tables_.fork(sequence);
  try {
    if (sparse_ != nullptr) sparse_->index().copy_values(sequence, child);
    if (sparse_ != nullptr) sparse_->index().clear_bad(child);
    if (listed_ != nullptr) listed_->copy(sequence, child);
    publish();
  } catch (...) {
    close(child);
    throw;
  }
  return child;
}

void KvPool::close(std::int32_t sequence) noexcept {
  forget_sums(sequence);
  tables_.close(sequence);
  if (disk_ == nullptr) return;
  try {
    write_lost(PageSlots::kNone);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): who reads the pages is told
  }
}

void KvPool::truncate(std::int32_t sequence, std::span<const std::int64_t> ends,
                      std::int64_t length, Ledger& ledger) {
  if (sparse_ != nullptr) {
    for (int layer = 0; layer < plan_.shape.layers; ++layer) {
      const std::int64_t from = ends[static_cast<std::size_t>(layer)];
      const std::int64_t to = tables_.rows(sequence, length, set_of(layer));
      if (from == to) continue;
      if (!restore_sums(layer, sequence, length)) subtract_values(layer, sequence, to, from);
      sparse_->index().truncate(layer, sequence, from, to, rows(layer));
    }
  }
  if (length < kept_length_) forget_sums(sequence);
  tables_.truncate(sequence, length);
  if (disk_ == nullptr) return;
  write_lost(PageSlots::kNone);
  record_uncounted(ledger);
}

void KvPool::ready_index(std::int32_t sequence, std::int64_t first, std::int64_t end,
                         Ledger& ledger) {
  kept_rows_ = true;
  if (parked_ == nullptr) return;
  const std::vector<std::int64_t> parked = tables_.parked_tiles(sequence);
  const std::int64_t taken = first < end ? tables_.tiles_for_write(sequence, first, end) : 0;
  const auto free = [&] { return tables_.tile_slots().free_slots(); };
  const std::int64_t lacking = std::ssize(parked) + taken - free();
  const std::vector<std::int32_t> cold = tables_.cold_tiles(lacking);
  check(std::ssize(cold) >= lacking, "a step whose index does not fit the device");
  auto next = cold.begin();
  // One by one, so that they need room in host memory for one more and not for a whole sequence.
  for (const std::int64_t number : parked) {
    if (free() == 0) park(*next++);
    unpark(sequence, number);
  }
  while (next != cold.end()) park(*next++);
  record_moved_tiles(ledger);
}

void KvPool::ready_scorers(std::int32_t sequence, Ledger& ledger) {
  if (parked_ == nullptr || !sparse_->index().has_own_pages()) return;
  announce_step({&sequence, 1});
  ready_index(sequence, 0, 0, ledger);
  publish();
}

void KvPool::park(std::int32_t tile) {
  const ParkedTile to = tables_.next_to_park(tile);
  parked_->park(to.slot, to.place);
  tables_.park_tile(to);
  ++tiles_down_;
}

void KvPool::unpark(std::int32_t sequence, std::int64_t number) {
  const ParkedTile from = tables_.next_to_unpark(sequence, number);
  parked_->bring(from.place, from.slot);
  tables_.unpark_tile(from, number);
  ++tiles_up_;
}

void KvPool::record_moved_tiles(Ledger& ledger) {
  if (ledger.history().empty()) return;
  const auto down = static_cast<std::uint64_t>(std::exchange(tiles_down_, 0));
  const auto up = static_cast<std::uint64_t>(std::exchange(tiles_up_, 0));
  const std::uint64_t rows = static_cast<std::uint64_t>(plan_.shape.kv_heads) * kTilePages *
                             static_cast<std::uint64_t>(kPageTokens);
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    const std::uint64_t bytes = sparse_->index().tile_bytes(layer);
    if (bytes == 0) continue;
    ledger.record(layer, Tier::device, Tier::host, Cause::index_swap, {down * rows, down * bytes});
    ledger.record(layer, Tier::host, Tier::device, Cause::index_swap, {up * rows, up * bytes});
  }
}

void KvPool::save_tile(int layer, std::int32_t sequence, std::int64_t number, std::byte* out) {
  KeyIndex& index = sparse_->index();
  const std::int32_t slot = tables_.tile(sequence, number);
  if (slot != IndexTiles::kNone) return index.save_tile(layer, slot, out);
  const CopyOp op = {out, parked_->part(layer, tables_.parked_place(sequence, number)),
                     index.tile_bytes(layer)};
  queue_->copy({&op, 1});
}

void KvPool::keep_sums(std::int32_t sequence, std::int64_t length) {
  if (sparse_ == nullptr || !plan_.layout->sums_values()) return;
  kept_sequence_ = sparse_->index().keep_sums(sequence) ? sequence : -1;
  kept_length_ = length;
}

// Adds the values of later tokens one by one, as their steps did: subtracting would leave the
// rounding of what was added.
bool KvPool::restore_sums(int layer, std::int32_t sequence, std::int64_t length) {
  const bool near = length >= kept_length_ && length - kept_length_ <= kMostBatch;
  if (sequence != kept_sequence_ || !near) return false;
  KeyIndex& index = sparse_->index();
  if (index.value_sums(layer) == nullptr) return true;
  const int set = set_of(layer);
  const std::int64_t first = tables_.rows(sequence, kept_length_, set);
  const std::int64_t end = tables_.rows(sequence, length, set);
  const std::vector<RowRun> runs = disk_ == nullptr
                                       ? host_runs(tables_, sequence, first, end, set)
                                       : nearest_runs(tables_, sequence, first, end, set);
  const auto is_below = [&](const RowRun& run) {
    return disk_ != nullptr && run.place == RowPlace::host;
  };
  if (std::any_of(runs.begin(), runs.end(), is_below)) return false;
  index.restore_sums(layer, sequence);
  for (const RowRun& run : runs) {
    for (std::int64_t at = run.first; at < run.end(); ++at) {
      index.add_values(layer, sequence, spans(layer, run.part(at, at + 1)), false);
    }
  }
  return true;
}

// Takes the values of rows [first, end) off the sums of the sequence.
void KvPool::subtract_values(int layer, std::int32_t sequence, std::int64_t first,
                             std::int64_t end) {
  KeyIndex& index = sparse_->index();
  if (disk_ == nullptr) {
    for (const RowRun& run : host_runs(tables_, sequence, first, end, set_of(layer))) {
      index.add_values(layer, sequence, spans(layer, run), true);
    }
    return;
  }
  if (index.value_sums(layer) == nullptr) return;
  for (const RowRun& run : nearest_runs(tables_, sequence, first, end, set_of(layer))) {
    if (run.place == RowPlace::device) {
      index.add_values(layer, sequence, spans(layer, run), true);
      continue;
    }
    // Page by page, because the parts of a run have to begin with a page to be read.
    for (std::int64_t at = run.first; at < run.end();) {
      const std::int64_t page = at / kPageTokens * kPageTokens;
      const std::int64_t next = std::min(run.end(), page + kPageTokens);
      const std::int64_t skipped = at - page;
      const RowRun whole = {RowPlace::host, page, next - page,
                            run.number + at - run.first - skipped};
      std::vector<RowSpan> rows =
          page_below(layer, whole, next - at, uncounted_[static_cast<std::size_t>(layer)].read);
      for (RowSpan& span : rows) {
        span.rows += static_cast<std::size_t>(skipped) * plan_.shape.row_bytes();
        span.count -= skipped;
      }
      index.add_values(layer, sequence, rows, true);
      queue_->synchronize();  // the buffer is read again
      at = next;
    }
  }
}

std::vector<std::int32_t> KvPool::write(std::int32_t sequence, std::int64_t first, std::int64_t end,
                                        Ledger& ledger) {
  return write(sequence, first, end, false, ledger);
}

std::int64_t KvPool::write_by_layers(std::int32_t sequence, std::int64_t first, std::int64_t end,
                                     Ledger& ledger) {
  write(sequence, first, end, true, ledger);
  return rows_in_host(sequence, first, end);
}

std::vector<std::int32_t> KvPool::write_rows(std::int32_t sequence, int layer, std::int64_t first,
                                             std::int64_t end, Ledger& ledger) {
  kept_rows_ = true;
  settle();
  const int set = set_of(layer);
  const BlockTables::Writing writing = tables_.write_rows(sequence, set, first, end);
  const std::int64_t rows = rows_in_host(sequence, set, first, end);
  kept_rows_ = writing.blocks.empty() && writing.tiles.empty();
  // No more than these rows: what a prompt leaves free is for others.
  host_->commit(0, rows);
  host_used_ = std::max(host_used_, rows);
  forget_cached(sequence, set, first, end);
  copy_shared(writing, ledger);
  kept_rows_ = true;
  publish();
  return writing.begun;
}

// Rows of a region up to the last one of rows [first, end) of a set.
std::int64_t KvPool::rows_in_host(std::int32_t sequence, int set, std::int64_t first,
                                  std::int64_t end) const {
  std::int64_t rows = 0;
  for (std::int64_t page = first / kPageTokens; page * kPageTokens < end; ++page) {
    const std::int64_t used = std::min<std::int64_t>(kPageTokens, end - page * kPageTokens);
    rows = std::max(rows, tables_.page(sequence, page, set).host * kPageTokens + used);
  }
  return rows;
}

// The same for tokens [first, end) in every table.
std::int64_t KvPool::rows_in_host(std::int32_t sequence, std::int64_t first,
                                  std::int64_t end) const {
  std::int64_t rows = 0;
  for (int table = 0; table < tables_.limits().tables(); ++table) {
    const std::int64_t row = tables_.rows(sequence, first, table);
    rows = std::max(rows, rows_in_host(sequence, table, row, row + end - first));
  }
  return rows;
}

void KvPool::forget_cached(std::int32_t sequence, int set, std::int64_t first, std::int64_t end) {
  if (cache_ == nullptr) return;
  cache_->write(tables_, sequence, set, first, end, [&](std::int64_t from, std::int64_t blocks) {
    if (disk_rows_ == nullptr) return;
    queue_->synchronize();  // a step that failed may still be fetching
    disk_rows_->forget(from, blocks);
  });
}

void KvPool::copy_shared(const BlockTables::Writing& writing, Ledger& ledger) {
  for (const BlockCopy& copy : writing.blocks) copy_block(copy, ledger);
  for (const TileCopy& copy : writing.tiles) {
    for (int layer = 0; layer < plan_.shape.layers; ++layer) {
      if (tables_.table_of(set_of(layer)) != copy.table) continue;
      sparse_->index().copy_tile(layer, copy.from, copy.to);
    }
  }
}

std::vector<std::int32_t> KvPool::write(std::int32_t sequence, std::int64_t first, std::int64_t end,
                                        bool by_layers, Ledger& ledger) {
  kept_rows_ = true;
  settle();  // copies of a step that failed
  kept_rows_ = false;
  const BlockTables::Writing writing = tables_.write(sequence, first, end);
  make_room_on_host(writing, sequence, first, rows_in_host(sequence, first, end), by_layers);
  if (disk_ != nullptr) {
    // The page that the new tokens continue is written once it is complete.
    const bool continues = first % kPageTokens != 0;
    write_lost(continues ? tables_.page(sequence, first / kPageTokens).host : PageSlots::kNone);
    record_uncounted(ledger);
  }
  for (int table = 0; table < tables_.limits().tables(); ++table) {
    const std::int64_t row = tables_.rows(sequence, first, table);
    forget_cached(sequence, table, row, row + end - first);
  }
  copy_shared(writing, ledger);
  publish();
  return writing.begun;
}

void KvPool::attach(std::int32_t sequence, std::int64_t pages,
                    const std::shared_ptr<PageFile>& file, Ledger& ledger) {
  check(attaches(), "a pool that attaches no pages");
  kept_rows_ = true;
  settle();
  kept_rows_ = false;
  const std::int64_t tokens = pages * kPageTokens;
  const BlockTables::Writing writing = tables_.write(sequence, 0, tokens);
  check(writing.blocks.empty(), "pages attached to a sequence that is not empty");
  write_lost(PageSlots::kNone);
  record_uncounted(ledger);
  forget_cached(sequence, 0, 0, tokens);
  std::vector<std::int32_t> blocks;
  for (std::int64_t page = 0; page < pages; ++page) {
    blocks.push_back(tables_.page(sequence, page).host);
  }
  disk_->attach(file, blocks);
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    const int set = set_of(layer);
    for (std::int64_t page = 0; page < pages; ++page) {
      const PageSlots slots = tables_.page(sequence, page, set);
      if (slots.device == PageSlots::kNone) continue;
      copy_above_disk(layer, {set, {PageSlots::kNone, slots.host}, slots, kPageTokens}, ledger);
    }
  }
  publish();
}

void KvPool::make_room_on_host(const BlockTables::Writing& writing, std::int32_t sequence,
                               std::int64_t first, std::int64_t rows, bool by_layers) {
  try {
    if (disk_ != nullptr) {
      grow_above_disk(sequence, first, rows);
    } else if (plan_.ragged) {
      host_->grow_to(rows);
    } else if (by_layers && writing.blocks.empty()) {
      host_->charge(rows);
    } else {
      host_->grow(rows);  // pages copied now need host memory in all layers
    }
  } catch (...) {
    tables_.truncate(sequence, first);
    // Pages and tiles that were not copied are not where the tables now say.
    kept_rows_ = writing.blocks.empty() && writing.tiles.empty();
    throw;
  }
  host_used_ = std::max(host_used_, rows);
}

// Pages that are attached to a file need no host memory, so only new ones count.
void KvPool::grow_above_disk(std::int32_t sequence, std::int64_t first, std::int64_t rows) {
  const std::int64_t page = tables_.page(sequence, first / kPageTokens).host;
  const std::int64_t end = (rows + kPageTokens - 1) / kPageTokens;
  if (!disk_->lacks_room(page, end)) return;
  queue_->synchronize();  // a step that failed may still be reading pages
  disk_->grow(end);
}

void KvPool::write_lost(std::int32_t but) {
  const std::vector<LostSlot> lost = tables_.take_lost_slots();
  if (lost.empty()) return;
  disk_->wait_for(*queue_);
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    const int set = set_of(layer);
    std::vector<DevicePage> pages;
    for (const LostSlot& at : lost) {
      if (at.set != set || at.block == but) continue;
      pages.push_back(
          {at.block, on_device(layer, 0, at.slot * std::int64_t{kPageTokens}), device_stride(set)});
    }
    Written& written = uncounted_[static_cast<std::size_t>(layer)].written;
    written.rows += std::ssize(pages) * kPageTokens;
    written.to_disk += disk_->write(layer, pages) * kPageTokens;
  }
}

std::vector<RowSpan> KvPool::page_below(int layer, const RowRun& page, std::int64_t wanted,
                                        Traffic& read) {
  transfer_->synchronize();
  // A disk reads whole pages.
  const auto heads = static_cast<std::uint64_t>(plan_.shape.kv_heads);
  if (!disk_->is_in_host(layer, page.number / kPageTokens)) {
    read += {heads * static_cast<std::uint64_t>(wanted), heads * disk_->layout().page_bytes};
  }
  return disk_->page_rows(layer, page);
}

void KvPool::record_uncounted(Ledger& ledger) {
  if (ledger.history().empty()) return;
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    const Uncounted moved = std::exchange(uncounted_[static_cast<std::size_t>(layer)], {});
    record_written(layer, moved.written, ledger);
    ledger.record(layer, Tier::disk, Tier::host, Cause::miss, moved.read);
  }
}

std::int64_t KvPool::rows_on_disk(int layer, std::int32_t sequence, std::int64_t first,
                                  std::int64_t end) const {
  if (disk_ == nullptr) return 0;
  std::int64_t rows = 0;
  for (RowRun run : nearest_runs(tables_, sequence, first, end, set_of(layer))) {
    if (run.place == RowPlace::device) continue;
    while (run.count > 0) {
      const RowRun part = disk_->first_part(layer, run);
      if (!disk_->is_in_host(layer, part.number / kPageTokens)) rows += part.count;
      run = run.part(part.end(), run.end());
    }
  }
  return rows;
}

void KvPool::record_written(int layer, const Written& written, Ledger& ledger) const {
  ledger.record(layer, Tier::device, Tier::host, Cause::write_back,
                traffic_of(plan_.shape, written.rows));
  ledger.record(layer, Tier::host, Tier::disk, Cause::write_back,
                traffic_of(plan_.shape, written.to_disk));
}

void KvPool::grow_ahead(std::int64_t rows) noexcept {
  try {
    const std::int64_t of_row = plan_.ragged ? plan_.shape.layers : 1;
    if (disk_ != nullptr) return disk_->grow_to((host_used_ + rows) / kPageTokens);
    host_->grow_to(std::min(of_row * plan_.host_rows(), host_used_ + of_row * rows));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the write that needs it reports
  }
}

// Copies to the device come from the device if the rows are resident, else from host memory.
void KvPool::copy_block(const BlockCopy& copy, Ledger& ledger) {
  const std::size_t bytes = static_cast<std::size_t>(copy.rows) * plan_.shape.row_bytes();
  const bool on_device = copy.to.device != PageSlots::kNone;
  const bool fetches = on_device && copy.from.device == PageSlots::kNone;
  for (int layer = 0; layer < plan_.shape.layers; ++layer) {
    if (set_of(layer) != copy.set) continue;
    if (disk_ != nullptr) {
      copy_above_disk(layer, copy, ledger);
      continue;
    }
    std::vector<CopyOp> ops;
    for (int head = 0; head < plan_.shape.kv_heads; ++head) {
      const std::byte* const from_host = host(layer, head, copy.from.host * kPageTokens);
      if (on_device) {
        const std::byte* const from =
            fetches ? from_host : this->on_device(layer, head, copy.from.device * kPageTokens);
        ops.push_back({this->on_device(layer, head, copy.to.device * kPageTokens), from, bytes});
      }
      if (copy.to.host != PageSlots::kNone) {
        ops.push_back({host(layer, head, copy.to.host * kPageTokens), from_host, bytes});
      }
    }
    if (!ops.empty()) queue_->copy(ops);
    if (fetches) {
      ledger.record(layer, Tier::host, Tier::device, Cause::miss,
                    traffic_of(plan_.shape, copy.rows));
    }
  }
}

// The same where a disk has the rows that are not resident.
void KvPool::copy_above_disk(int layer, const BlockCopy& copy, Ledger& ledger) {
  if (copy.to.device == PageSlots::kNone) return;
  const auto to = [&](int head) {
    return on_device(layer, head, copy.to.device * std::int64_t{kPageTokens});
  };
  if (copy.from.device == PageSlots::kNone) {
    const RowRun run = {RowPlace::host, 0, copy.rows, copy.from.host * std::int64_t{kPageTokens}};
    Traffic read;
    const std::vector<RowSpan> rows = page_below(layer, run, copy.rows, read);
    std::vector<CopyOp> ops;
    for (int head = 0; head < plan_.shape.kv_heads; ++head) {
      ops.push_back({to(head), rows[static_cast<std::size_t>(head)].rows,
                     static_cast<std::size_t>(copy.rows) * plan_.shape.row_bytes()});
    }
    queue_->copy(ops);
    queue_->synchronize();  // the buffer is read again
    ledger.record(layer, Tier::disk, Tier::host, Cause::miss, read);
    ledger.record(layer, Tier::host, Tier::device, Cause::miss, traffic_of(plan_.shape, copy.rows));
    return;
  }
  std::vector<CopyOp> ops;
  for (int head = 0; head < plan_.shape.kv_heads; ++head) {
    ops.push_back({to(head), on_device(layer, head, copy.from.device * std::int64_t{kPageTokens}),
                   static_cast<std::size_t>(copy.rows) * plan_.shape.row_bytes()});
  }
  queue_->copy(ops);
}

void KvPool::publish() {
  const std::vector<BlockTables::Change> changes = tables_.take_changes();
  try {
    publish(changes);
  } catch (...) {
    tables_.change_all();
    throw;
  }
}

// Merges changes of neighbouring entries into one copy.
void KvPool::publish(std::span<const BlockTables::Change> changes) {
  std::vector<BlockTables::Change> page_changes;
  std::vector<PageSlots> pages;
  pages.reserve(changes.size() * static_cast<std::size_t>(plan_.sets()));
  std::vector<std::int32_t> tiles(changes.size());
  std::vector<CopyOp> ops;
  const auto add = [&](std::byte* to, const void* from, std::size_t bytes) {
    const auto* const data = static_cast<const std::byte*>(from);
    if (!ops.empty() && ops.back().to + ops.back().bytes == to &&
        ops.back().from + ops.back().bytes == data) {
      ops.back().bytes += bytes;
    } else {
      ops.push_back({to, data, bytes});
    }
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const BlockTables::Change& change = changes[i];
    if (!tables_.is_open(change.sequence)) continue;
    if (change.is_tile) {
      if (change.number >= tables_.tiles(change.sequence, change.table)) continue;
      tiles[i] = tables_.tile(change.sequence, change.number, change.table);
      const std::int64_t at =
          tiles_of(change.table) + change.sequence * plan_.layout->sequence_tiles() + change.number;
      add(tiles_.data() + static_cast<std::size_t>(at) * sizeof(std::int32_t), &tiles[i],
          sizeof(std::int32_t));
    } else if (change.number < tables_.pages(change.sequence, change.table)) {
      page_changes.push_back(change);
    }
  }
  for (int set = 0; set < plan_.sets(); ++set) {
    for (const BlockTables::Change& change : page_changes) {
      if (change.table != tables_.table_of(set)) continue;
      pages.push_back(tables_.page(change.sequence, change.number, set));
      const std::int64_t at =
          table_of(set) + change.sequence * plan_.layout->pages() + change.number;
      add(pages_.data() + static_cast<std::size_t>(at) * sizeof(PageSlots), &pages.back(),
          sizeof(PageSlots));
    }
  }
  if (!ops.empty()) queue_->copy(ops);
  if (host_attention_ == nullptr) return;
  std::vector<std::int64_t> entries;
  for (const BlockTables::Change& change : page_changes) {
    entries.push_back(change.sequence * plan_.layout->pages() + change.number);
  }
  host_attention_->mirror(entries);
}

std::vector<RowSpan> KvPool::page_rows(int layer, std::int32_t sequence, std::int64_t page,
                                       std::int64_t count) {
  settle();
  queue_->synchronize();
  const PageSlots slots = tables_.page(sequence, page, set_of(layer));
  const RowRun in_host = {RowPlace::host, page * kPageTokens, count,
                          slots.host * std::int64_t{kPageTokens}};
  if (disk_ == nullptr) return spans(layer, in_host);
  if (slots.device == PageSlots::kNone) return disk_->page_rows(layer, in_host);
  const DevicePage on_device = {slots.host,
                                this->on_device(layer, 0, slots.device * std::int64_t{kPageTokens}),
                                device_stride(set_of(layer))};
  disk_->wait_for(*queue_);
  return disk_->resident_spans(on_device, count);
}

PagedRows KvPool::rows(int layer) const {
  PagedRows rows;
  if (host_ != nullptr) {
    rows.host = host(layer, 0, 0);
    rows.host_stride = host_->head_stride();
  }
  const int set = set_of(layer);
  if (!plan_.in_place) {
    rows.device = on_device(layer, 0, 0);
    rows.device_stride = device_stride(set);
  }
  rows.pages = reinterpret_cast<const PageSlots*>(pages_.data()) + table_of(set);
  rows.table_stride = plan_.layout->pages();
  return rows;
}

std::int64_t KvPool::device_stride(int set) const {
  return device_rows(set) * static_cast<std::int64_t>(plan_.shape.row_bytes());
}

std::byte* KvPool::on_device(int layer, int head, std::int64_t number) const {
  const std::int64_t row =
      on_device_[static_cast<std::size_t>(layer)] + head * device_rows(set_of(layer)) + number;
  return device_.data() + static_cast<std::size_t>(row) * plan_.shape.row_bytes();
}

std::byte* KvPool::row(int layer, int head, const RowRun& run) const {
  switch (run.place) {
    case RowPlace::device:
      return on_device(layer, head, run.number);
    case RowPlace::window:
      return window(head) + static_cast<std::size_t>(run.number) * plan_.shape.row_bytes();
    case RowPlace::host:
      break;
  }
  return host(layer, head, run.number);
}

std::vector<RowSpan> KvPool::spans(int layer, const RowRun& run) const {
  std::vector<RowSpan> spans;
  for (int head = 0; head < plan_.shape.kv_heads; ++head) {
    spans.push_back({row(layer, head, run), run.count});
  }
  return spans;
}

std::byte* KvPool::window(int head) const {
  return window_.data() +
         static_cast<std::size_t>(head * plan_.window_tokens) * plan_.shape.row_bytes();
}

std::byte* KvPool::stream(std::size_t buffer, int head) const {
  const auto heads = static_cast<std::size_t>(plan_.shape.kv_heads);
  const auto tokens = static_cast<std::size_t>(plan_.stream_tokens);
  return stream_.data() +
         (buffer * heads + static_cast<std::size_t>(head)) * tokens * plan_.shape.row_bytes();
}

}  // namespace sluice
