// Host memory for every row: one region per (layer, KV head).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "sluice/types.h"

namespace sluice {

// Address space is reserved for all `rows` of a region at once, so that rows never move; memory is
// committed, charged to the host account and registered with the backend in steps as it grows.
class HostStore {
 public:
  HostStore(Backend& backend, const KvShape& shape, std::int64_t rows);
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;
  ~HostStore();

  // Makes room for `rows` rows in every region, and at least a quarter more than before, so that it
  // grows rarely. Throws Error{memory} and stays as it was if the host cap or the machine does not
  // allow it.
  void grow(std::int64_t rows);
  // The same, but at most 64 MiB in advance, plus rounding to huge pages: growth that overlaps
  // other waits can go in small steps.
  void grow_to(std::int64_t rows);
  // grow() in two parts, for rows written layer by layer: charge() charges the rows of all layers,
  // commit() commits the rows of one, which takes as long as zeroing and registering them.
  void charge(std::int64_t rows);
  void commit(int layer, std::int64_t rows);
  // Gives back the charge for rows that no layer has committed.
  void release_uncommitted();

  // Address of a row in a region, by its number; later rows follow it.
  std::byte* row(int layer, int head, std::int64_t number) const;
  // Bytes from one KV head's region to the next one's.
  std::int64_t head_stride() const { return static_cast<std::int64_t>(region_bytes_); }

  // Rows that every layer has committed.
  std::int64_t committed_rows() const {
    return *std::min_element(committed_.begin(), committed_.end());
  }

 private:
  struct Piece {
    std::byte* data;
    std::uint64_t bytes;
  };

  std::uint64_t regions() const;
  std::byte* region(int layer, int head) const;
  void grow_ahead(std::int64_t rows, std::int64_t ahead);
  std::int64_t rounded(std::int64_t rows) const;
  void charge_to(std::int64_t target);
  // Memory that layers [first, last) lack for `target` rows.
  std::vector<Piece> missing(int first, int last, std::int64_t target) const;
  void commit(int first, int last, std::int64_t target);
  void back(std::span<const Piece> pieces);
  void withdraw(std::span<const Piece> pieces, std::size_t registered) noexcept;

  Backend* backend_;
  KvShape shape_;
  std::int64_t rows_;
  std::uint64_t region_bytes_;
  std::byte* base_ = nullptr;
  std::int64_t charged_ = 0;             // rows per region
  std::vector<std::int64_t> committed_;  // [layers], rows per region
  std::vector<std::byte*> registered_;
};

}  // namespace sluice
