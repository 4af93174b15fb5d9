// A backend with a queue, and transfers of arrays to and from its memory.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "lib/backend.h"

namespace sluice::testing {

struct Device {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Queue> queue;

  explicit Device(std::unique_ptr<Backend> owned)
      : backend(std::move(owned)), queue(backend->make_queue()) {}

  const BackendInfo& info() const { return backend->info(); }
  Buffer allocate(Tier tier, std::size_t bytes) { return backend->allocate(tier, bytes); }
  void synchronize() { queue->synchronize(); }
};

template <typename T>
Buffer upload(Device& device, const std::vector<T>& values) {
  const std::size_t bytes = values.size() * sizeof(T);
  Buffer buffer = device.allocate(device.info().compute_tier, bytes);
  if (bytes == 0) return buffer;
  const CopyOp op = {buffer.data(), reinterpret_cast<const std::byte*>(values.data()), bytes};
  device.queue->copy(std::span(&op, 1));
  return buffer;
}

template <typename T>
std::vector<T> download(Device& device, const Buffer& buffer) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  const CopyOp op = {reinterpret_cast<std::byte*>(values.data()), buffer.data(), buffer.bytes()};
  if (!values.empty()) device.queue->copy(std::span(&op, 1));
  device.synchronize();
  return values;
}

// Rows of KV heads in one buffer, at equal distances.
struct UploadedHeads {
  Buffer buffer;
  std::vector<RowSpan> spans;
};
inline UploadedHeads upload_heads(Device& device, const std::vector<std::vector<std::byte>>& heads,
                                  std::size_t row_bytes) {
  std::vector<std::byte> all;
  for (const std::vector<std::byte>& head : heads) all.insert(all.end(), head.begin(), head.end());
  UploadedHeads uploaded{upload(device, all), {}};
  const std::byte* rows = uploaded.buffer.data();
  for (const std::vector<std::byte>& head : heads) {
    uploaded.spans.push_back({rows, static_cast<std::int64_t>(head.size() / row_bytes)});
    rows += head.size();
  }
  return uploaded;
}

}  // namespace sluice::testing
