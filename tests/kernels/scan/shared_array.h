// Arrays that host and device share.
#pragma once

#include <cstddef>
#include <cstring>

#include "kernels/runtime/owners.h"

namespace sluice::cuda {

// Memory that host and device see at one address.
template <typename T>
class Shared {
 public:
  explicit Shared(std::size_t count) : count_(count), block_(make_pinned_block(count * sizeof(T))) {
    std::memset(block_.get(), 0, count * sizeof(T));
  }
  T* data() const { return static_cast<T*>(block_.get()); }
  T& operator[](std::size_t i) const { return data()[i]; }
  std::size_t size() const { return count_; }

 private:
  std::size_t count_;
  PinnedBlock block_;
};

}  // namespace sluice::cuda
