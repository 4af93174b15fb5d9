#include "offload/tiers/disk_pages.h"

#include <algorithm>
#include <utility>

#include "io/disk.h"
#include "lib/check.h"

namespace sluice {

bool is_disk_failure(const Error& error) {
  return error.code() == ErrorCode::io || error.code() == ErrorCode::corrupt;
}

std::byte* first_sector(const Buffer& buffer) {
  const auto at = reinterpret_cast<std::uintptr_t>(buffer.data());
  return buffer.data() + (kSectorBytes - at % kSectorBytes) % kSectorBytes;
}

DiskPages::DiskPages(Queue& queue, const KvPlan& plan, const DiskSource& source)
    : queue_(&queue),
      layout_(plan),
      stream_pages_(stream_pages(plan)),
      written_pages_(written_pages(plan)),
      blocks_(plan.blocks) {
  check(!source.directories.empty(), "a plan on disk without a directory");
  const DiskHostBytes bytes(plan);
  Backend& backend = queue.backend();
  streamed_ = backend.allocate(Tier::host, bytes.streamed);
  written_ = backend.allocate(Tier::host, bytes.written);
  charge_.emplace(backend.account(Tier::host), bytes.store);
  PageStoreConfig config = layout_.store();
  config.directories = source.directories;
  config.access = source.access;
  config.factory = source.factory;
  config.patience = source.patience;
  store_ = std::make_unique<PageStore>(config);
  if (layout_.blocks_in_host == 0) return;
  host_ = std::make_unique<HostStore>(backend, plan.shape, layout_.blocks_in_host * kPageTokens);
}

DiskPages::~DiskPages() {
  for (std::optional<DiskTicket>& read : reads_) read.reset();
  for (Write& write : writes_) write.ticket.reset();
  keep(std::move(streamed_));
  keep(std::move(written_));
}

// A buffer that is kept is never freed, because its backend may be gone once the disk answers.
void DiskPages::keep(Buffer buffer) {
  if (!store_->has_given_up()) return;
  store_->keep(std::shared_ptr<Buffer>(new Buffer(std::move(buffer)), [](Buffer*) {}));
}

std::byte* DiskPages::page_in(const Buffer& buffer, std::size_t half, int head, std::int64_t page,
                              std::int64_t pages) const {
  const auto heads = static_cast<std::size_t>(layout_.shape.kv_heads);
  const std::size_t number =
      (half * heads + static_cast<std::size_t>(head)) * static_cast<std::size_t>(pages) +
      static_cast<std::size_t>(page);
  return first_sector(buffer) + number * layout_.page_bytes;
}

std::int64_t DiskPages::host_rows_before(std::int64_t block) const {
  const std::int64_t before = block - layout_.first_in_host;
  return std::clamp<std::int64_t>(before, 0, layout_.blocks_in_host) * kPageTokens;
}

bool DiskPages::lacks_room(std::int64_t first, std::int64_t end) const {
  const std::int64_t rows = host_rows_before(end);
  const bool has_some = rows > host_rows_before(first);
  return has_some && rows > host_->committed_rows();
}

bool DiskPages::is_in_host(int layer, std::int64_t block) const {
  if (!layout_.is_in_host(block)) return false;
  const std::lock_guard lock(mutex_);
  return attached_.empty() || attached_[number_of(layer, block)].file == nullptr;
}

RowRun DiskPages::first_part(int layer, const RowRun& run) const {
  const auto place = [&](std::int64_t number) { return is_in_host(layer, number / kPageTokens); };
  const bool first = place(run.number);
  std::int64_t count = std::min(run.count, kPageTokens - run.number % kPageTokens);
  while (count < run.count && place(run.number + count) == first) {
    count = std::min<std::int64_t>(run.count, count + kPageTokens);
  }
  return run.part(run.first, run.first + count);
}

std::int64_t DiskPages::write(int layer, std::span<const DevicePage> pages) {
  std::vector<DevicePage> kept;
  std::vector<DevicePage> others;
  for (const DevicePage& page : pages) {
    (layout_.is_in_host(page.block) ? kept : others).push_back(page);
  }
  keep_in_host(layer, kept);
  std::span<const DevicePage> rest = others;
  while (!rest.empty()) {
    const std::size_t batch = std::min(rest.size(), static_cast<std::size_t>(written_pages_));
    write_batch(layer, rest.first(batch));
    rest = rest.subspan(batch);
  }
  return std::ssize(others);
}

// Copies pages to host memory, neighbours together.
void DiskPages::keep_in_host(int layer, std::span<const DevicePage> pages) {
  if (pages.empty()) return;
  constexpr auto kRows = std::int64_t{kPageTokens};
  const std::size_t page_bytes = static_cast<std::size_t>(kRows) * layout_.shape.row_bytes();
  std::vector<CopyOp> ops;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    for (const DevicePage& page : pages) {
      host_->commit(layer, (page.block + 1 - layout_.first_in_host) * kRows);
      std::byte* const to = host_row(layer, head, {.count = kRows, .number = page.block * kRows});
      const std::byte* const from = page.rows + head * page.head_stride;
      const bool follows = !ops.empty() && ops.back().to + ops.back().bytes == to &&
                           ops.back().from + ops.back().bytes == from;
      if (follows) {
        ops.back().bytes += page_bytes;
      } else {
        ops.push_back({to, from, page_bytes});
      }
    }
  }
  queue_->copy(ops);
  queue_->synchronize();
  for (const DevicePage& page : pages) detach(layer, page.block);
}

void DiskPages::detach(int layer, std::int64_t block) {
  const std::lock_guard lock(mutex_);
  if (!attached_.empty()) attached_[number_of(layer, block)] = {};
}

// Pages go to the disk while the next batch comes from the device.
void DiskPages::write_batch(int layer, std::span<const DevicePage> pages) {
  const std::size_t half = bring(pages, kPageTokens);
  std::vector<PageWrite> writes;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      writes.push_back({layout_.stored(layout_.address(layer, head, pages[i].block)),
                        {written_page(half, head, i), layout_.page_bytes}});
    }
  }
  for (const DevicePage& page : pages) detach(layer, page.block);
  const std::lock_guard lock(mutex_);
  writes_[half].layer = layer;
  writes_[half].ticket.emplace(store_->write(writes));
}

std::size_t DiskPages::bring(std::span<const DevicePage> pages, std::int64_t count) {
  const std::size_t half = std::exchange(next_write_, 1 - next_write_);
  {
    const std::lock_guard lock(mutex_);
    finish(writes_[half]);
  }
  const std::size_t bytes = static_cast<std::size_t>(count) * layout_.shape.row_bytes();
  std::vector<CopyOp> ops;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    for (std::size_t i = 0; i < pages.size(); ++i) {
      ops.push_back(
          {written_page(half, head, i), pages[i].rows + head * pages[i].head_stride, bytes});
    }
  }
  queue_->copy(ops);
  queue_->synchronize();
  return half;
}

// A failed write leaves its sectors unreadable, so only sessions that read them fail.
void DiskPages::finish(Write& write) {
  if (!write.ticket) return;
  for (const DiskFailure& failed : write.ticket->failures()) {
    if (failure_.empty()) failure_ = failed.error.what();
  }
  write.ticket.reset();
}

void DiskPages::wait_for_writes(int layer) {
  const std::lock_guard lock(mutex_);
  for (Write& write : writes_) {
    if (write.layer == layer) finish(write);
  }
}

void DiskPages::wait_for_writes() {
  const std::lock_guard lock(mutex_);
  for (Write& write : writes_) finish(write);
}

std::string DiskPages::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void DiskPages::attach(const std::shared_ptr<PageFile>& file,
                       std::span<const std::int32_t> blocks) {
  check(takes_files(), "a file of pages of another size");
  const std::lock_guard lock(mutex_);
  attached_.resize(static_cast<std::size_t>(layout_.shape.layers * blocks_));
  for (int layer = 0; layer < layout_.shape.layers; ++layer) {
    for (std::size_t page = 0; page < blocks.size(); ++page) {
      attached_[number_of(layer, blocks[page])] = {file, static_cast<std::int64_t>(page)};
    }
  }
}

PageRead DiskPages::read_of(std::uint64_t address, std::span<std::byte> to) const {
  const std::lock_guard lock(mutex_);
  if (attached_.empty()) return {layout_.stored(address), to};
  const auto heads = static_cast<std::uint64_t>(layout_.shape.kv_heads);
  const auto layers = static_cast<std::uint64_t>(layout_.shape.layers);
  const std::uint64_t region = address / layout_.region_bytes;
  const std::uint64_t position = address % layout_.region_bytes;
  const Attached& at = attached_[number_of(
      static_cast<int>(region / heads), static_cast<std::int64_t>(position / layout_.page_bytes))];
  if (at.file == nullptr) return {layout_.stored(address), to};
  const std::uint64_t extent =
      (static_cast<std::uint64_t>(at.page) * layers * heads) + region;  // of a page and a KV head
  return {extent * layout_.page_bytes + position % layout_.page_bytes, to, at.file};
}

void DiskPages::begin_read(std::size_t half, int layer, const RowRun& run) {
  check(run.number % kPageTokens == 0 && run.count <= stream_pages_ * kPageTokens,
        "a run that does not fit the disk's buffer");
  wait_for_writes(layer);
  const std::int64_t block = run.number / kPageTokens;
  const std::int64_t pages = (run.count + kPageTokens - 1) / kPageTokens;
  std::vector<PageRead> reads;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    for (std::int64_t page = 0; page < pages; ++page) {
      PageRead read =
          read_of(layout_.address(layer, head, block + page),
                  {page_in(streamed_, half, head, page, stream_pages_), layout_.page_bytes});
      const bool follows = page > 0 && read.file == nullptr && reads.back().file == nullptr;
      if (follows) {
        reads.back().destination = {reads.back().destination.data(),
                                    reads.back().destination.size() + layout_.page_bytes};
      } else {
        reads.push_back(std::move(read));
      }
    }
  }
  reads_[half].emplace(store_->read(reads, DiskPriority::urgent));
}

void DiskPages::end_read(std::size_t half) {
  const std::optional<DiskTicket> ticket = std::exchange(reads_[half], std::nullopt);
  check(ticket.has_value(), "the end of a read that was not begun");
  const std::vector<DiskFailure> failures = ticket->failures();
  if (failures.empty()) return;
  const Error& error = failures.front().error;
  const std::string write = failure();
  if (write.empty()) throw Error(error);
  throw Error(error.code(), std::string(error.what()) + "; before it, a write failed: " + write);
}

void DiskPages::add_copies(std::size_t half, int head, const RowRun& run, std::byte* to,
                           std::vector<CopyOp>& ops) const {
  const std::size_t row_bytes = layout_.shape.row_bytes();
  const bool is_padded = layout_.page_bytes != kPageTokens * row_bytes;
  const std::int64_t step = is_padded ? kPageTokens : run.count;
  for (std::int64_t first = 0; first < run.count; first += step) {
    const std::int64_t rows = std::min(step, run.count - first);
    ops.push_back({to + static_cast<std::size_t>(first) * row_bytes,
                   page_in(streamed_, half, head, first / kPageTokens, stream_pages_),
                   static_cast<std::size_t>(rows) * row_bytes});
  }
}

std::vector<RowSpan> DiskPages::page_rows(int layer, const RowRun& page) {
  check(page.count <= kPageTokens, "rows of several pages");
  const bool in_host = is_in_host(layer, page.number / kPageTokens);
  if (!in_host) {
    begin_read(0, layer, page);
    end_read(0);
  }
  std::vector<RowSpan> spans;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    spans.push_back(
        {in_host ? host_row(layer, head, page) : page_in(streamed_, 0, head, 0, stream_pages_),
         page.count});
  }
  return spans;
}

std::vector<RowSpan> DiskPages::resident_spans(const DevicePage& page, std::int64_t count) {
  const std::size_t half = bring({&page, 1}, count);
  std::vector<RowSpan> spans;
  for (int head = 0; head < layout_.shape.kv_heads; ++head) {
    spans.push_back({written_page(half, head, 0), count});
  }
  return spans;
}

}  // namespace sluice
