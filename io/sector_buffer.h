#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>

#include "io/disk.h"
#include "lib/bytes.h"

namespace sluice {

// Memory that O_DIRECT accepts: aligned to a sector and as many bytes as asked for, rounded up to
// whole sectors, all zero.
class SectorBuffer {
 public:
  explicit SectorBuffer(std::size_t bytes) : size_(round_up(bytes, kSectorBytes)) {
    bytes_.reset(static_cast<std::byte*>(std::aligned_alloc(kSectorBytes, size_)));
    if (!bytes_) throw std::bad_alloc();
    std::fill_n(bytes_.get(), size_, std::byte{0});
  }

  std::span<std::byte> span() { return {bytes_.get(), size_}; }
  std::span<const std::byte> span() const { return {bytes_.get(), size_}; }
  std::span<std::byte> sectors(std::size_t first, std::size_t count) {
    return span().subspan(first * kSectorBytes, count * kSectorBytes);
  }

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  std::size_t size_;
  std::unique_ptr<std::byte, Free> bytes_;
};

}  // namespace sluice
