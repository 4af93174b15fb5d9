// Arrays to and from a backend's memory.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "lib/backend.h"

namespace sluice::testing {

template <typename T>
Buffer upload(Backend& backend, const std::vector<T>& values) {
  const std::size_t bytes = values.size() * sizeof(T);
  Buffer buffer = backend.allocate(backend.info().compute_tier, bytes);
  if (bytes == 0) return buffer;
  const CopyOp op = {buffer.data(), reinterpret_cast<const std::byte*>(values.data()), bytes};
  backend.copy(std::span(&op, 1), Stream::compute);
  return buffer;
}

template <typename T>
std::vector<T> download(Backend& backend, const Buffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  const CopyOp op = {reinterpret_cast<std::byte*>(values.data()), buffer.data(), buffer.bytes()};
  if (!values.empty()) backend.copy(std::span(&op, 1), Stream::compute);
  backend.synchronize();
  return values;
}

}  // namespace sluice::testing
