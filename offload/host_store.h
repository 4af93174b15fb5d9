// The home of every row: one region of host memory per (layer, KV head).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lib/backend.h"
#include "sluice/types.h"

namespace sluice {

// Address space is reserved for the whole context at once, so that rows never move; memory is
// committed, charged to the host account and registered with the backend in steps as it grows.
class HostStore {
 public:
  HostStore(Backend& backend, const KvShape& shape, std::int64_t context);
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;
  ~HostStore();

  // Makes room for `tokens` rows in every region. Throws Error{memory} and stays as it was if
  // the host cap or the machine does not allow it.
  void grow(std::int64_t tokens);

  // Where the row of `position` is; rows of later positions follow it.
  std::byte* row(int layer, int head, std::int64_t position) const;

  std::int64_t committed_tokens() const { return committed_; }

 private:
  std::uint64_t regions() const;
  std::byte* region(std::uint64_t index) const { return base_ + index * region_bytes_; }
  std::int64_t next_size(std::int64_t tokens) const;
  void commit(std::uint64_t from, std::uint64_t to);
  void withdraw(std::uint64_t from, std::uint64_t to) noexcept;
  bool populate(std::uint64_t from, std::uint64_t to) const;

  Backend* backend_;
  KvShape shape_;
  std::int64_t context_;
  std::uint64_t region_bytes_;
  std::byte* base_ = nullptr;
  std::int64_t committed_ = 0;
  std::vector<std::byte*> registered_;
};

}  // namespace sluice
