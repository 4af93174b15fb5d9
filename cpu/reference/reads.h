// What the reference backend reads of sequences, as it reads it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sluice::cpu {

// What is read of a page of one KV head's index, or of its value tiles.
struct PageRead {
  std::int32_t sequence = 0;
  int head = 0;
  std::int64_t page = 0;
  std::size_t bytes = 0;
};

// Overridden by who wants to know, as tests do that hold an account of reads to what was read.
class ReferenceReads {
 public:
  ReferenceReads() = default;
  ReferenceReads(const ReferenceReads&) = delete;
  ReferenceReads& operator=(const ReferenceReads&) = delete;
  virtual ~ReferenceReads() = default;

  // A row, keys and values: for every KV head and token of a batch that attends to it, once for
  // each part of the query heads (see ReadPattern); once for every KV head of a chunk of tokens,
  // and once when it is gathered.
  virtual void on_read(const std::byte* /*row*/, std::size_t /*bytes*/) {}
  // Query heads of a KV head that attend in one part.
  virtual int attend_queries() const = 0;
};

}  // namespace sluice::cpu
