// The home of every row: one region of host memory per (layer, KV head).
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

  // Makes room for `rows` rows in every region, and for a quarter more than there was, so that it
  // need not grow often. Throws Error{memory} and stays as it was if the host cap or the machine
  // does not allow it.
  void grow(std::int64_t rows);
  // The same, but for no more than 64 MiB in advance and the ends of huge pages: what grows while
  // something else is waited for need not be much at a time.
  void grow_to(std::int64_t rows);
  // grow() in two parts, for what is written layer by layer: charges for the rows of all layers,
  // and then commits those of one, which takes as long as zeroing and registering them.
  void charge(std::int64_t rows);
  void commit(int layer, std::int64_t rows);
  // Gives back what was charged for and no layer has.
  void release_uncommitted();

  // Where a row of a region is, by its number; later rows follow it.
  std::byte* row(int layer, int head, std::int64_t number) const;
  // Bytes from one KV head's region to the next one's.
  std::int64_t head_stride() const { return static_cast<std::int64_t>(region_bytes_); }

  // Of every layer.
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
  // What layers [first, last) lack of `target` rows.
  std::vector<Piece> missing(int first, int last, std::int64_t target) const;
  void commit(int first, int last, std::int64_t target);
  void back(std::span<const Piece> pieces);
  void withdraw(std::span<const Piece> pieces, std::size_t registered) noexcept;

  Backend* backend_;
  KvShape shape_;
  std::int64_t rows_;
  std::uint64_t region_bytes_;
  std::byte* base_ = nullptr;
  std::int64_t charged_ = 0;             // rows of every region
  std::vector<std::int64_t> committed_;  // [layers], of those
  std::vector<std::byte*> registered_;
};

}  // namespace sluice
