// Reports of the reference backend's reads of sequences, as they happen.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice::cpu {

// A read of one page of a KV head's index or value tiles.
struct PageRead {
  std::int32_t sequence = 0;
  int head = 0;
  std::int64_t page = 0;
  std::size_t bytes = 0;
};

// Overridden to observe reads, for example by tests that compare the ledger with the actual reads.
class ReferenceReads {
 public:
  ReferenceReads() = default;
  ReferenceReads(const ReferenceReads&) = delete;
  ReferenceReads& operator=(const ReferenceReads&) = delete;
  virtual ~ReferenceReads() = default;

  // Called when a row, key and value, is read. In a batch: once per KV head and token that attends
  // to it, for each part of the query heads (see ReadPattern). In a chunk of tokens: once per KV
  // head. In a gather: once.
  virtual void on_read(const std::byte* /*row*/, std::size_t /*bytes*/) {}
  // Query heads of one KV head that attend together, as one part.
  virtual int attend_queries() const = 0;
};

}  // namespace sluice::cpu
