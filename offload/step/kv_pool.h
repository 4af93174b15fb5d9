// The memory of a plan: rows in host memory and on the device, the key index and the work space,
// shared by all sequences of the pool.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "lib/backend.h"
#include "offload/attention/host_attention.h"
#include "offload/attention/listed_pages.h"
#include "offload/attention/parked_tiles.h"
#include "offload/attention/sparse_attention.h"
#include "offload/cache/disk_rows.h"
#include "offload/cache/row_cache.h"
#include "offload/step/important_tokens.h"
#include "offload/tiers/block_tables.h"
#include "offload/tiers/disk_pages.h"
#include "offload/tiers/host_store.h"
#include "offload/tiers/kv_rows.h"
#include "sluice/batch.h"
#include "sluice/kv_cache.h"
#include "sluice/ledger.h"
#include "sluice/policy.h"
#include "sluice/scorer.h"

namespace sluice {

class KvPool {
 public:
  // Allocates the memory of the plan, except the rows in host memory, which grow with use. Steps
  // are issued to `queue`. `policies`: those that sequences may use, by scorers in `scorers`;
  // empty: dense. `attender` attends if the plan has host attention, `disk` has the rows if they
  // are planned to lie on disk, `basis` is for policies that keep half the components of values.
  KvPool(std::shared_ptr<Queue> queue, const KvPlan& plan, std::span<const Policy> policies = {},
         const Scorers& scorers = own_scorers(), const HostAttender& attender = {},
         const DiskSource& disk = {}, const ValueBasis& basis = {});
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;
  ~KvPool();

  Backend& backend() const { return queue_->backend(); }
  // queue(): steps. transfer(): row transfers beside them.
  Queue& queue() const { return *queue_; }
  Queue& transfer() const { return *transfer_; }
  const KvPlan& plan() const { return plan_; }
  const std::vector<Policy>& policies() const { return policies_; }
  const BlockTables& tables() const { return tables_; }
  // The set in the tables that a layer belongs to.
  int set_of(int layer) const { return sets_[static_cast<std::size_t>(layer)]; }
  // Blocks in tokens of every layer.
  std::int64_t tokens_of(std::int64_t blocks) const {
    return blocks * kPageTokens / tables_.limits().tables();
  }
  // The tier where attention reads: device, or host if rows are attended in place.
  Tier tier() const { return plan_.in_place ? Tier::host : Tier::device; }

  // See BlockTables. Forks share blocks in every part of the pool.
  std::int32_t open();
  std::int32_t fork(std::int32_t sequence);
  // Pages of others that lose their place on the device by it are written to disk, and counted by
  // the next write() or truncate(): this sequence's ledger ends with it.
  void close(std::int32_t sequence) noexcept;
  // Forgets tokens from `length` on. `ends`: by layer, the rows that there are. What it reads from
  // disk and writes to it counts with the ledger's latest step, or the next write() if it has none.
  void truncate(std::int32_t sequence, std::span<const std::int64_t> ends, std::int64_t length,
                Ledger& ledger);
  // Keeps the sums of values of a sequence of `length` tokens, before a step that may be cut: a
  // truncate() to one of its tokens, or to one of the next few, restores them to the bit.
  void keep_sums(std::int32_t sequence, std::int64_t length);
  // Tokens are added to the sums other than one by one from here on.
  void forget_sums(std::int32_t sequence) {
    if (kept_sequence_ == sequence) kept_sequence_ = -1;
  }
  // Gives back blocks beyond `length` tokens, which were never written.
  void forget_blocks(std::int32_t sequence, std::int64_t length) {
    tables_.truncate(sequence, length);
  }

  // Announces a step of these sequences: until the next is announced their key index stays on the
  // device. Each calls ready_index() when it begins.
  void announce_step(std::span<const std::int32_t> sequences) { tables_.begin_tiles(sequences); }
  // Brings a sequence's key index to the device and makes room there for that of tokens [first,
  // end), if the plan has no room for all: then tiles of other sequences go to host memory, least
  // recently used ones first. Copies are issued to the queue, so they wait for the work that writes
  // or reads the tiles. Throws Error{memory} if host memory runs out; some tiles have moved then,
  // and all sequences are as they were.
  void ready_index(std::int32_t sequence, std::int64_t first, std::int64_t end, Ledger& ledger);
  // The same for forgetting tokens, if a scorer may read its own memory for it.
  void ready_scorers(std::int32_t sequence, Ledger& ledger);
  // A layer's part of a tile of a sequence, wherever it is, see KeyIndex. Memory is used until the
  // queue is idle.
  void save_tile(int layer, std::int32_t sequence, std::int64_t number, std::byte* out);

  // Throws Error{memory} if the pool has no blocks for tokens [first, end) of a sequence.
  void require_room(std::int32_t sequence, std::int64_t first, std::int64_t end) const {
    tables_.require_room(sequence, first, end);
  }
  // Makes room for tokens [first, end) of a sequence, copies shared pages, and updates the tables
  // where the backend reads them. Counts rows that came from host memory. Returns
  // BlockTables::Writing's `begun`, by set of layers. Throws what require_room() throws with
  // nothing changed, and Error{memory} if host memory runs out; then the sequence can only be
  // closed, unless kept_rows().
  std::vector<std::int32_t> write(std::int32_t sequence, std::int64_t first, std::int64_t end,
                                  Ledger& ledger);
  // The same, but a layer's rows get host memory only in ready_host_rows(), which takes this
  // function's result: memory is committed while the device is busy with the layer before.
  // ready_host_rows() throws Error{memory} if host memory runs out, with nothing changed.
  std::int64_t write_by_layers(std::int32_t sequence, std::int64_t first, std::int64_t end,
                               Ledger& ledger);
  void ready_host_rows(int layer, std::int64_t rows) { host_->commit(layer, rows); }
  // Ragged only: write() for rows [first, end) of one layer, in a prompt whose rows are staged; see
  // BlockTables. Throws what write() throws; the prompt's rows up to `first` stay as they are.
  std::vector<std::int32_t> write_rows(std::int32_t sequence, int layer, std::int64_t first,
                                       std::int64_t end, Ledger& ledger);
  // Ends such a prompt of tokens [first, end). `rows`: by layer, those of all tokens.
  void end_staged(std::int32_t sequence, std::int64_t first, std::int64_t end,
                  std::span<const std::int64_t> rows) {
    tables_.evict(sequence, first, end, rows);
  }
  // Call after a write_by_layers() if some layers did not get their host memory.
  void forget_host_rows() { host_->release_uncommitted(); }

  // True if whole pages of a saved file can be attached: rows lie on disk, in the file's format,
  // and nothing is computed from all of them but the index.
  bool attaches() const {
    return disk_ != nullptr && disk_->takes_files() && listed_ == nullptr && !plan_.ragged;
  }
  // Gives an empty sequence the `pages` pages of a file, which are read when they are wanted; those
  // that are resident, now. The caller sets their index. Throws what write() throws, and Error{io}
  // or Error{corrupt}; then the sequence can only be closed.
  void attach(std::int32_t sequence, std::int64_t pages, const std::shared_ptr<PageFile>& file,
              Ledger& ledger);

  // Returns true if the sequence kept its rows when the latest of these threw; false if it had a
  // shared page to copy.
  bool kept_rows() const { return kept_rows_; }

  // Commits host memory for `rows` rows more than were ever written, so that a later write() need
  // not wait for it; does nothing if host memory runs out.
  void grow_ahead(std::int64_t rows) noexcept;

  // Copies rows to host memory while the queue goes on. Until settle() the copies may be under way,
  // and the rows on the device must not change.
  void send_to_host(std::span<const CopyOp> ops);
  // Makes the queue's later work wait for these copies.
  void settle();

  // Rows of [first, end) of a sequence that a layer reads from disk, per KV head.
  std::int64_t rows_on_disk(int layer, std::int32_t sequence, std::int64_t first,
                            std::int64_t end) const;

  // Rows of every KV head of a layer that went from the device to host memory, and of these on to
  // the disk.
  struct Written {
    std::int64_t rows = 0;
    std::int64_t to_disk = 0;
  };
  void record_written(int layer, const Written& written, Ledger& ledger) const;

  // The first `count` rows of a page of a sequence, in host memory: where they lie, or read from
  // disk or copied from the device. Waits for all work; no step may be under way. Valid until the
  // next call that reads or writes rows. Throws Error{io} or Error{corrupt} if the disk fails.
  std::vector<RowSpan> page_rows(int layer, std::int32_t sequence, std::int64_t page,
                                 std::int64_t count);

  PagedRows rows(int layer) const;
  // A row by its number in a region: slot * kPageTokens + offset.
  std::byte* host(int layer, int head, std::int64_t number) const {
    return host_->row(plan_.ragged ? 0 : layer, head, number);
  }
  std::byte* on_device(int layer, int head, std::int64_t number) const;
  // Bytes on the device from one KV head of a layer to the next.
  std::int64_t device_stride(int set) const;
  // The first row of a run in one KV head, and the run in every KV head.
  std::byte* row(int layer, int head, const RowRun& run) const;
  std::vector<RowSpan> spans(int layer, const RowRun& run) const;
  // Room for one layer at a time, per KV head: for the rows of a step, and for rows that stream
  // through.
  std::byte* window(int head) const;
  std::byte* stream(std::size_t buffer, int head) const;
  std::byte* arena() const { return stream_.data(); }
  // The step's tokens where the backend reads them, and if tables are ragged, as a layer has them.
  BatchToken* tokens() const { return reinterpret_cast<BatchToken*>(tokens_.data()); }
  BatchToken* tokens(int layer) const { return tokens() + (1 + layer) * plan_.decode_batch; }

  SparseAttention* sparse() const { return sparse_.get(); }  // null if all policies are dense
  DiskPages* disk() const { return disk_.get(); }            // null if host memory has every row
  // Null without a disk or without selection.
  DiskRows* disk_rows() const { return disk_rows_.get(); }
  HostAttention* host_attention() const { return host_attention_.get(); }  // null if there is none
  RowCache* cache() const { return cache_.get(); }                         // null if there is none
  ImportantTokens* important() const { return important_.get(); }          // null if all prefill is

  ListedPages* listed() const { return listed_.get(); }  // null if no prefill lists pages

  // Recorded steps, by policy, number of tokens, capacity of the sequences, and host attention or
  // none.
  using StepKind = std::tuple<std::size_t, std::int64_t, std::int64_t, bool>;
  std::map<StepKind, std::unique_ptr<Recording>>& recordings() { return recordings_; }

 private:
  std::vector<std::int32_t> write(std::int32_t sequence, std::int64_t first, std::int64_t end,
                                  bool by_layers, Ledger& ledger);
  std::int64_t rows_in_host(std::int32_t sequence, int set, std::int64_t first,
                            std::int64_t end) const;
  std::int64_t rows_in_host(std::int32_t sequence, std::int64_t first, std::int64_t end) const;
  void make_room_on_host(const BlockTables::Writing& writing, std::int32_t sequence,
                         std::int64_t first, std::int64_t rows, bool by_layers);
  void grow_above_disk(std::int32_t sequence, std::int64_t first, std::int64_t rows);
  void forget_cached(std::int32_t sequence, int set, std::int64_t first, std::int64_t end);
  void copy_shared(const BlockTables::Writing& writing, Ledger& ledger);
  // Moves a tile that no sequence of the step has to host memory, or one of a sequence back.
  void park(std::int32_t tile);
  void unpark(std::int32_t sequence, std::int64_t number);
  // Counts the tiles that moved; not yet, if the ledger has no step.
  void record_moved_tiles(Ledger& ledger);
  void copy_block(const BlockCopy& copy, Ledger& ledger);
  void copy_above_disk(int layer, const BlockCopy& copy, Ledger& ledger);
  // The first rows of a page below the device, see DiskPages::page_rows(). Waits for rows that
  // stream through the same buffer. If a disk read the page, adds its bytes and `wanted` rows to
  // `read`.
  std::vector<RowSpan> page_below(int layer, const RowRun& page, std::int64_t wanted,
                                  Traffic& read);
  // Counts what moved between host memory and disk outside of a step; not yet, if the ledger has no
  // step.
  void record_uncounted(Ledger& ledger);
  // Writes to disk the pages that lost their place on the device, except block `but`.
  void write_lost(std::int32_t but);
  // Sets a layer's sums to what they were at `length`. False if no sums near it were kept.
  bool restore_sums(int layer, std::int32_t sequence, std::int64_t length);
  void subtract_values(int layer, std::int32_t sequence, std::int64_t first, std::int64_t end);
  void publish();
  void publish(std::span<const BlockTables::Change> changes);
  // The first entry of a set's page table, and of a table's tiles.
  std::int64_t table_of(int set) const { return set * plan_.sequences * plan_.layout->pages(); }
  std::int64_t tiles_of(int table) const {
    return table * plan_.sequences * plan_.layout->sequence_tiles();
  }
  // Room in rows of each KV head of a layer on the device; if ragged, of all layers.
  std::int64_t device_rows(int set) const {
    return plan_.ragged ? plan_.shape.layers * plan_.device_rows() : plan_.device_rows(set);
  }

  std::shared_ptr<Queue> queue_;
  std::unique_ptr<Queue> transfer_;
  KvPlan plan_;
  std::vector<Policy> policies_;
  std::vector<int> sets_;                // by layer
  std::vector<std::int64_t> on_device_;  // by layer: rows of the layers before it; 0 if ragged
  BlockTables tables_;
  std::unique_ptr<HostStore> host_;  // null if rows lie on disk
  std::unique_ptr<DiskPages> disk_;
  // Of a layer: what was written, and what was read from disk.
  struct Uncounted {
    Written written;
    Traffic read;
  };
  std::vector<Uncounted> uncounted_;  // by layer, see record_uncounted()
  std::int64_t host_used_ = 0;        // rows of a region up to the last one written
  bool sends_to_host_ = false;        // transfer_ may still be copying rows to host memory
  Buffer device_;  // [layers, kv_heads, device_rows(), row_bytes]; ragged: one layer
  Buffer window_;  // [kv_heads, window_tokens, row_bytes]
  Buffer stream_;  // [2, kv_heads, stream_tokens, row_bytes]
  Buffer pages_;   // PageSlots [sets, sequences, pages of one]
  Buffer tiles_;   // std::int32_t [tables, sequences, tiles of one]
  Buffer tokens_;  // BatchToken [1, or 1 + layers if ragged, decode_batch]
  std::unique_ptr<RowCache> cache_;
  std::unique_ptr<DiskRows> disk_rows_;
  std::int32_t kept_sequence_ = -1;  // of keep_sums(); -1: none
  std::int64_t kept_length_ = 0;
  std::unique_ptr<SparseAttention> sparse_;
  std::unique_ptr<ParkedTiles> parked_;  // null if the device has room for all tiles
  std::int64_t tiles_down_ = 0;          // moved since record_moved_tiles()
  std::int64_t tiles_up_ = 0;
  std::unique_ptr<ImportantTokens> important_;
  std::unique_ptr<ListedPages> listed_;
  std::unique_ptr<HostAttention> host_attention_;
  bool kept_rows_ = true;
  std::map<StepKind, std::unique_ptr<Recording>> recordings_;
};

}  // namespace sluice
