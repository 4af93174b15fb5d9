// The interface between Sluice's policy and the processor that computes: CPU or CUDA.
//
// A backend has memory and makes queues; queues do the work. A call per layer and operation crosses
// the interface, never one per page or row. Pointers are the backend's own ("device") pointers
// unless a comment says host. A backend whose info() says synchronous finishes every call before it
// returns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/backend/memory.h"
#include "lib/backend/queue.h"
#include "sluice/scorer.h"
#include "sluice/types.h"

namespace sluice {

// The read pattern of a backend, for the account of reads: data that the queries of a KV head share
// is read once per part of these queries.
struct ReadPattern {
  static constexpr int kAll = std::numeric_limits<int>::max();

  int tile_pages = 1;           // pages of a tile, which is read whole
  int estimate_queries = kAll;  // queries per part in estimates
  int attend_queries = kAll;    // queries per part in attention of decoded tokens

  static int parts(int group, int queries) { return (group - 1) / queries + 1; }
};

// Measured rates of the bus between host memory and a device with separate memory, in bytes per
// second; 0 without such a device.
struct LinkRates {
  double copied = 0.0;  // copies of megabytes
  double read = 0.0;    // kernels that read rows in host memory
};

struct BackendInfo {
  std::string name;                  // "cpu", "reference", "cuda:0"
  std::string description;           // processor and instruction sets, for people
  bool attends_host_rows = false;    // rows in host memory can be attended where they lie
  bool synchronous = false;          // every call finishes before it returns
  Tier compute_tier = Tier::host;    // tier of weights and activations
  DType compute_dtype = DType::f32;  // dtype of the inputs of linear()
  LogitFormat logits;                // of estimates
  ReadPattern reads;
  Processor processor = Processor::host;
  std::vector<int> head_dims;  // that attention has kernels for; empty: all even ones up to 256
  bool f32_rows = true;        // supports rows in f32 besides f16 and bf16
  std::vector<RowCode> row_codes = {RowCode::int8, RowCode::k8v4};  // of rows that it supports
  bool windows = true;  // attention to the newest rows only
  // Codes rows of elements that are written into coded weights, to the bits of encode_rows().
  bool codes_weights = false;
  int most_query_heads = std::numeric_limits<int>::max();
  int threads = 1;
  LinkRates link;
  std::uint64_t memory_bytes = 0;  // of a device with separate memory
  std::uint64_t branch_bytes = 0;  // device memory that Queue::prepare_branches() takes
  double memory_rate = 0.0;        // nominal bandwidth of that memory, bytes per second
  // Bytes of a layer's rows, all resident where attention reads them: up to this size, reading
  // every row takes less time than selecting by an INT4 index (presets `values` and `sluice`).
  std::uint64_t dense_bytes = 0;
  // Bytes of the rows in host memory that a step selects in a layer: from this size on, looking
  // them up in a row cache takes less time than fetching them again.
  std::uint64_t cached_bytes = 0;

  bool takes(const RowFormat& rows) const {
    if (!rows.is_coded()) return rows != DType::f32 || f32_rows;
    return std::find(row_codes.begin(), row_codes.end(), rows.code) != row_codes.end();
  }
};

// The work of a session that determines the memory that CPU threads take for themselves.
struct ThreadWork {
  KvShape shape;
  std::int64_t context = 0;           // tokens of a sequence
  std::int64_t chunk = 0;             // most tokens per step of prefill; 0: no prefill
  std::vector<WeightShape> products;  // every matrix of the model; empty: the caller multiplies
  bool lists_pages = false;           // a prompt attends to listed pages (Policy::Prefill::pages)
  bool sums_columns = false;  // a prompt chooses its important tokens (Policy::Prefill::tau)
};

class Backend : public Memory {
 public:
  virtual const BackendInfo& info() const = 0;

  // The most resident memory in bytes that the threads take for `work` besides charged memory:
  // stacks and scratch, which they keep. 0 for a backend that does not compute on host threads.
  virtual std::uint64_t thread_bytes(const ThreadWork& /*work*/) const { return 0; }

  // Makes a queue; a backend may have any number. Throws Error{usage} for a stream of another
  // device and Error{memory} as allocate() does.
  virtual std::unique_ptr<Queue> make_queue(const QueueOptions& options) = 0;
  std::unique_ptr<Queue> make_queue() { return make_queue({}); }

  // The format of weights if no other is asked for: elements that products lose nothing by.
  virtual WeightFormat weight_format() const = 0;
  // Returns true if weights may be of this format.
  virtual bool stores(const WeightFormat& format) const { return format == weight_format(); }
  // The bytes that make_weight() charges for such a weight.
  virtual std::uint64_t weight_bytes(const WeightShape& shape) const = 0;
  // The bytes that it charges besides, once: the most that any of its weights asks for.
  virtual std::uint64_t product_bytes(const WeightShape& /*shape*/) const { return 0; }
  // Memory of the compute tier for a matrix of weights, which WriteWeightParams fill. Throws
  // Error{memory} as allocate() does, and what require_format() throws.
  std::unique_ptr<Weight> make_weight(const WeightShape& shape);
  // Throws Error{unsupported} for a format that the backend does not store, or whose groups do not
  // divide the inputs.
  void require_format(const WeightShape& shape) const;
  // The dtype of weights stored as dense rows, which can also serve embed() as a table; nullopt:
  // they are not.
  virtual std::optional<DType> dense_weights() const { return std::nullopt; }
  // Rows of such a weight are written from a multiple of it on, because they share their place in
  // memory.
  virtual std::int64_t weight_rows(const WeightFormat& /*format*/) const { return 1; }
  // A weight with the rows of `host` [outputs, inputs], host memory of any dtype, dense rows. For
  // weights that are in memory anyway: one copy of them is charged while this runs.
  std::unique_ptr<Weight> prepare_weight(const Matrix& host, const WeightFormat& format);
  std::unique_ptr<Weight> prepare_weight(const Matrix& host) {
    return prepare_weight(host, weight_format());
  }

 protected:
  // make_weight() of a format that the backend stores.
  virtual std::unique_ptr<Weight> take_weight(const WeightShape& shape) = 0;

 private:
  friend class Queue;
  std::shared_ptr<const void> life_ = std::make_shared<char>();  // queues watch it
};

}  // namespace sluice
