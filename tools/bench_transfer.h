// `sluice bench --transfer`: the rows that a step had to bring to a device, brought in other ways:
// with as many copies as the way needs, from host memory laid out as a cache's.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lib/backend.h"
#include "sluice/bus.h"
#include "sluice/traffic_counter.h"
#include "sluice/types.h"

namespace sluice::tools {

// gather: the rows of a layer by one kernel, as Sluice brings them. rows: one copy for each run of
// neighbouring rows. batched: the same copies as one request of the copy engine per layer. pageN:
// one copy for each page of N tokens that has such a row, whole.
struct TransferWay {
  enum class Kind : std::uint8_t { gather, rows, batched, pages };

  std::string name;
  Kind kind = Kind::gather;
  int page = 1;  // tokens of a copy; rows: 1, but neighbours are one copy
};

// Throws Error{usage} for another name; N is a power of two from 8 to kPageTokens.
TransferWay parse_transfer(const std::string& name);

// What bringing the rows of some steps took.
struct Brought {
  TransferWay way;
  Crossing crossed;             // requests: copies, but of gather and batched one per attention
  std::vector<double> seconds;  // of each step
};

// The memory of a cache's rows and a device's buffer, apart from any cap.
class TransferBench {
 public:
  // Takes host memory for the rows of `tokens` tokens in one layer, or in several, up to 1 GiB, so
  // that rows are not found in a processor's caches because another layer's were read. Throws what
  // make_backend() and Backend::allocate() throw.
  TransferBench(const std::string& device, int threads, const KvShape& shape, std::int64_t tokens);
  std::int64_t tokens() const { return tokens_; }

  // Brings the rows that one step missed and adds what it took. Rows of all sequences are read from
  // the same memory. Throws Error{unsupported} if the backend has no batches of copies.
  void bring(std::span<const MissedRows> missed, Brought& to);

 private:
  std::byte* host_row(const MissedRows& rows, std::int64_t position) const;
  std::vector<CopyOp> copies(std::span<const MissedRows> missed, const TransferWay& way);
  double time_copies(std::span<const MissedRows> missed, Brought& to);
  double time_gather(std::span<const MissedRows> missed, Brought& to);
  void reserve_device(std::size_t bytes);

  KvShape shape_;
  std::int64_t tokens_;  // a multiple of kPageTokens
  int layers_ = 1;       // in `host_`
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Queue> queue_;
  Buffer host_;    // [layers_, kv_heads, tokens_, row_bytes]
  Buffer device_;  // rows of one attention
  Buffer pages_;   // PageSlots of all tokens: page i in slot i
};

}  // namespace sluice::tools
