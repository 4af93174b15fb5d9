// A backend that counts the actual traffic, to check ledger and caps against it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "cpu/reference/backend.h"

namespace sluice::testing {

// Tells device memory from host memory by address. Counts the bytes of every copy between them, of
// rows that decoding reads from or writes to host memory, of all rows and key index read, and of
// device memory allocated. It does not use the accounts or the ledger.
class CountingBackend : public cpu::ReferenceBackend {
 public:
  using Backend::make_queue;
  using ReferenceBackend::ReferenceBackend;
  inline std::unique_ptr<Queue> make_queue(const QueueOptions& options) override;

  // Rows in host memory lie in registered memory; all other crossings are tables.
  void register_host(std::byte* data, std::size_t bytes) override {
    host_rows_.push_back({data, bytes});
  }

  bool has_device() const { return !blocks_.empty(); }
  bool on_device(const std::byte* data) const { return within(blocks_, data); }
  bool is_host(const std::byte* data) const { return within(host_rows_, data); }

  std::uint64_t rows_read = 0;
  std::uint64_t host_rows_read = 0;
  std::uint64_t index_bytes_read = 0;
  std::uint64_t value_bytes_read = 0;  // of value tiles
  std::uint64_t host_to_device = 0;
  std::uint64_t device_to_host = 0;
  std::uint64_t host_rows_attended = 0;
  std::uint64_t device_bytes = 0;
  std::uint64_t device_peak = 0;

 private:
  struct Block {
    const std::byte* begin;
    std::size_t bytes;
  };

  static bool within(const std::vector<Block>& blocks, const std::byte* data) {
    return std::any_of(blocks.begin(), blocks.end(), [&](const Block& block) {
      return data >= block.begin && data < block.begin + block.bytes;
    });
  }

  std::byte* take(Tier tier, std::size_t bytes) override {
    std::byte* const data = ReferenceBackend::take(tier, bytes);
    if (tier == Tier::device) {
      blocks_.push_back({data, bytes});
      device_bytes += bytes;
      device_peak = std::max(device_peak, device_bytes);
    }
    return data;
  }

  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override {
    if (tier == Tier::device) {
      std::erase_if(blocks_, [&](const Block& block) { return block.begin == data; });
      device_bytes -= bytes;
    }
    ReferenceBackend::give_back(tier, data, bytes);
  }

  std::vector<Block> blocks_;
  std::vector<Block> host_rows_;
};

class CountingQueue : public cpu::ReferenceQueue {
 public:
  explicit CountingQueue(CountingBackend& backend) : ReferenceQueue(backend), counts_(&backend) {}

  void submit(const Operation& operation) override {
    if (const auto* copy = params_of<CopyParams>(operation)) count(*copy);
    if (const auto* append = params_of<AppendBatchParams>(operation)) count(*append);
    if (const auto* attend = params_of<AttendParams>(operation)) {
      count(*attend);
      in_run_ = true;
    }
    ReferenceQueue::submit(operation);
    in_run_ = false;
  }

 protected:
  void on_read(const std::byte* row, std::size_t bytes) override {
    ++counts_->rows_read;
    // Runs get their rows by copy(), which counts them. Without a device tier nothing crosses.
    if (in_run_ || !counts_->has_device() || counts_->on_device(row)) return;
    ++counts_->host_rows_read;
    counts_->host_to_device += bytes;
  }

  void on_index_read(const cpu::PageRead& read) override {
    counts_->index_bytes_read += read.bytes;
  }
  void on_values_read(const cpu::PageRead& read) override {
    counts_->value_bytes_read += read.bytes;
  }
  void on_key_read(const std::byte* row, std::size_t bytes) override {
    counts_->index_bytes_read += bytes;
    if (counts_->has_device() && !counts_->on_device(row)) counts_->host_to_device += bytes;
  }

 private:
  void count(const CopyParams& params) {
    for (const CopyOp& op : params.ops) {
      if (counts_->on_device(op.from) && counts_->is_host(op.to)) {
        counts_->device_to_host += op.bytes;
      }
      if (counts_->is_host(op.from) && counts_->on_device(op.to)) {
        counts_->host_to_device += op.bytes;
      }
    }
  }
  // Counts the rows outside the device tier that attention gets.
  void count(const AttendParams& params) {
    for (const RowSpan& rows : params.rows) {
      if (rows.count > 0 && !counts_->on_device(rows.rows)) {
        counts_->host_rows_attended += static_cast<std::uint64_t>(rows.count);
      }
    }
  }
  void count(const AppendBatchParams& params) {
    if (params.rows.device == nullptr) return;
    counts_->device_to_host +=
        static_cast<std::uint64_t>(params.batch.count * params.shape.kv_heads) *
        params.shape.row_bytes();
  }

  CountingBackend* counts_;
  bool in_run_ = false;  // inside attention to a run, whose rows copy() fetches
};

inline std::unique_ptr<Queue> CountingBackend::make_queue(const QueueOptions& /*options*/) {
  return std::make_unique<CountingQueue>(*this);
}

}  // namespace sluice::testing
