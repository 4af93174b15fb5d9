// Pages below the device, each in host memory or on disk: whole pages go down as they lose their
// place on the device, and come back in runs that stream through attention.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/page_store.h"
#include "lib/backend.h"
#include "offload/plan/disk_layout.h"
#include "offload/tiers/host_store.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/errors.h"
#include "sluice/kv_cache.h"

namespace sluice {

// The directories of a store, and for tests the disk that serves them.
struct DiskSource {
  std::vector<std::filesystem::path> directories;
  DiskAccess access = DiskAccess::automatic;
  DiskFactory factory = {};
  DiskPatience patience = {};
};

// A page whose rows are on the device: those of KV head 0, and the bytes from one head to the next.
struct DevicePage {
  std::int32_t block = 0;
  const std::byte* rows = nullptr;
  std::int64_t head_stride = 0;
};

// True for the errors of a page that could not be read.
bool is_disk_failure(const Error& error);

// The first byte of a buffer that may be a disk's: buffers are aligned to less than a sector.
std::byte* first_sector(const Buffer& buffer);

// Pages in host memory and in a page store, and the host memory through which pages of one layer
// pass between a queue's device and the store. For the thread that issues work; is_in_host(),
// host_row(), wait_for_writes() and failure() are also for the threads on which queues run host
// calls.
class DiskPages {
 public:
  // `queue` copies; nothing else of it is used. Throws what PageStore's constructor and
  // Backend::allocate() throw.
  DiskPages(Queue& queue, const KvPlan& plan, const DiskSource& source);
  DiskPages(const DiskPages&) = delete;
  DiskPages& operator=(const DiskPages&) = delete;
  ~DiskPages();

  // Copies that follow start after all work issued to `queue` so far.
  void wait_for(Queue& queue) { queue_->wait_for(queue); }
  // True if some of blocks [first, end) are planned to lie in host memory that is not committed.
  bool lacks_room(std::int64_t first, std::int64_t end) const;
  // Commits host memory for pages of these blocks, as HostStore::grow() does, or ahead of need as
  // grow_to(). Throws Error{memory}.
  void grow(std::int64_t end_block) {
    if (host_ != nullptr) host_->grow(host_rows_before(end_block));
  }
  void grow_to(std::int64_t end_block) {
    if (host_ != nullptr) host_->grow_to(host_rows_before(end_block));
  }
  // Writes pages of a layer; waits for the copies from the device, not for the disk. Their rows on
  // the device must not change before it returns. Returns the number of pages that go to the disk.
  std::int64_t write(int layer, std::span<const DevicePage> pages);

  // True if a block lies in host memory, unless it is resident.
  bool is_in_host(int layer, std::int64_t block) const;
  // The first row of a run of such blocks, which lie one behind the other.
  std::byte* host_row(int layer, int head, const RowRun& run) const {
    return host_->row(layer, head, run.number - layout_.first_in_host * kPageTokens);
  }
  // The first part of a run, in host numbers, whose blocks lie all in host memory or all on disk.
  RowRun first_part(int layer, const RowRun& run) const;

  // Blocks that have whole pages of a file in all layers: block first + i page i. The file has
  // [pages][layers][kv_heads][kPageTokens][row_bytes], see io's PageFile. They are read from there
  // until they are written. takes_files() must be true.
  void attach(const std::shared_ptr<PageFile>& file, std::span<const std::int32_t> blocks);
  // True if pages of this pool and of a file have the same bytes.
  bool takes_files() const { return layout_.page_bytes == kPageTokens * layout_.shape.row_bytes(); }
  // The read of bytes within a block, wherever they are. Any thread may call it.
  PageRead read_of(std::uint64_t address, std::span<std::byte> to) const;

  // Begins to read a run of rows, in host numbers and from a page's first row on, at most
  // `stream_tokens` of them, into half 0 or 1 of the buffer. Earlier copies from that half must be
  // over.
  void begin_read(std::size_t half, int layer, const RowRun& run);
  // Waits for that read. Throws Error{io} or Error{corrupt}.
  void end_read(std::size_t half);
  // Copies that bring a run that was read to `to(head)`, contiguous there.
  template <typename To>
  std::vector<CopyOp> copies(std::size_t half, const RowRun& run, To to) const {
    std::vector<CopyOp> ops;
    for (int head = 0; head < layout_.shape.kv_heads; ++head) {
      add_copies(half, head, run, to(head), ops);
    }
    return ops;
  }
  // The first rows of a page, from where they lie in host memory, or read from disk to half 0 of
  // the buffer and valid until its next use. Throws what end_read() throws.
  std::vector<RowSpan> page_rows(int layer, const RowRun& page);

  // Copies the first `count` rows of a page from the device, after wait_for(). Valid until the next
  // call of this or of write().
  std::vector<RowSpan> resident_spans(const DevicePage& page, std::int64_t count);

  // Waits until earlier writes, of one layer or of all, are on disk, so that they can be read.
  void wait_for_writes(int layer);
  void wait_for_writes();
  // The reason for which pages may be unreadable, for messages; empty if there is none.
  std::string failure() const;

  // Takes memory of requests whose owner ends: frees it, unless a silent disk may still use it.
  void keep(Buffer buffer);

  PageStore& store() { return *store_; }
  const DiskLayout& layout() const { return layout_; }

 private:
  struct Write {
    int layer = -1;
    std::optional<DiskTicket> ticket;
  };

  std::byte* page_in(const Buffer& buffer, std::size_t half, int head, std::int64_t page,
                     std::int64_t pages) const;
  void add_copies(std::size_t half, int head, const RowRun& run, std::byte* to,
                  std::vector<CopyOp>& ops) const;
  // Rows of a region in host memory up to a block.
  std::int64_t host_rows_before(std::int64_t block) const;
  void keep_in_host(int layer, std::span<const DevicePage> pages);
  void write_batch(int layer, std::span<const DevicePage> pages);
  void detach(int layer, std::int64_t block);
  // Brings the first `count` rows of up to written_pages_ pages to the next half of written_.
  std::size_t bring(std::span<const DevicePage> pages, std::int64_t count);
  std::byte* written_page(std::size_t half, int head, std::size_t page) const {
    return page_in(written_, half, head, static_cast<std::int64_t>(page), written_pages_);
  }
  void finish(Write& write);  // with mutex_ held
  std::size_t number_of(int layer, std::int64_t block) const {
    return static_cast<std::size_t>(layer * blocks_ + block);
  }

  Queue* queue_;
  DiskLayout layout_;
  std::int64_t stream_pages_;
  std::int64_t written_pages_;
  std::int64_t blocks_;
  std::unique_ptr<HostStore>
      host_;  // of the layout's blocks in host memory; null if there are none
  // Both from their first whole sector on:
  Buffer streamed_;               // [halves, kv_heads, stream_pages_, page_bytes]
  Buffer written_;                // [halves, kv_heads, written_pages_, page_bytes]
  std::optional<Charge> charge_;  // for the store's own memory
  std::unique_ptr<PageStore> store_;
  std::array<std::optional<DiskTicket>, DiskHostBytes::kHalves> reads_;
  std::size_t next_write_ = 0;
  // Of all that follows. Held while waiting for a write, because a ticket is for one thread.
  mutable std::mutex mutex_;
  std::array<Write, DiskHostBytes::kHalves> writes_;
  std::string failure_;
  // Of a block in a layer: the page of a file, or none.
  struct Attached {
    std::shared_ptr<PageFile> file;
    std::int64_t page = 0;
  };
  std::vector<Attached> attached_;  // [layers, blocks]; empty until a file is attached
};

}  // namespace sluice
