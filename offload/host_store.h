// The home of every row: one region of host memory per (layer, KV head).
#pragma once

#include <cstddef>
#include <cstdint>
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

  // Where a row of a region is, by its number; later rows follow it.
  std::byte* row(int layer, int head, std::int64_t number) const;
  // Bytes from one KV head's region to the next one's.
  std::int64_t head_stride() const { return static_cast<std::int64_t>(region_bytes_); }

  std::int64_t committed_rows() const { return committed_; }

 private:
  std::uint64_t regions() const;
  std::byte* region(std::uint64_t index) const { return base_ + index * region_bytes_; }
  void extend(std::int64_t target);
  std::int64_t rounded(std::int64_t rows) const;
  void commit(std::uint64_t from, std::uint64_t to);
  void withdraw(std::uint64_t from, std::uint64_t to) noexcept;
  bool populate(std::uint64_t from, std::uint64_t to) const;

  Backend* backend_;
  KvShape shape_;
  std::int64_t rows_;
  std::uint64_t region_bytes_;
  std::byte* base_ = nullptr;
  std::int64_t committed_ = 0;
  std::vector<std::byte*> registered_;
};

}  // namespace sluice
