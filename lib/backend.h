// The interface between Sluice's policy and the processor that computes: CPU or CUDA.
//
// A backend has memory and makes queues; queues do the work. A call per layer and operation crosses
// the interface, never one per page or row. Pointers are the backend's own ("device") pointers
// unless a comment says host. A backend whose info() says synchronous finishes every call before it
// returns.
#pragma once

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

// How a backend reads, for the account of reads: what a KV head's queries share is read once for
// each part of them.
struct ReadPattern {
  static constexpr int kAll = std::numeric_limits<int>::max();

  int tile_pages = 1;           // a tile is read whole: so many pages
  int estimate_queries = kAll;  // of a part, where estimates are made
  int attend_queries = kAll;    // of a part, where decoded tokens attend

  static int parts(int group, int queries) { return (group - 1) / queries + 1; }
};

// Of the bus between host memory and a device that has memory of its own, as measured, in bytes per
// second; 0 without such a device.
struct LinkRates {
  double copied = 0.0;  // by copies of megabytes
  double read = 0.0;    // by kernels, where rows lie
};

struct BackendInfo {
  std::string name;                  // "cpu", "reference", "cuda:0"
  std::string description;           // processor and instruction sets, for people
  bool attends_host_rows = false;    // rows in host memory can be attended where they lie
  bool synchronous = false;          // every call finishes before it returns
  Tier compute_tier = Tier::host;    // where weights and activations live
  DType compute_dtype = DType::f32;  // of the inputs of linear()
  LogitFormat logits;                // of estimates
  ReadPattern reads;
  Processor processor = Processor::host;
  std::vector<int> head_dims;  // that attention has kernels for; empty: all even up to 256
  bool f32_rows = true;        // besides f16 and bf16
  int most_query_heads = std::numeric_limits<int>::max();
  int threads = 1;
  LinkRates link;
  std::uint64_t memory_bytes = 0;  // of such a device
  double memory_rate = 0.0;        // what that memory is made for, in bytes per second
  // Of a layer's rows, all where attention reads them: up to so many, reading every one takes less
  // time than selecting by an INT4 index (presets `values` and `sluice`).
  std::uint64_t dense_bytes = 0;
  // Of the rows in host memory that a step selects in a layer: from so many on, looking for them in
  // a row cache takes less time than fetching them again.
  std::uint64_t cached_bytes = 0;
};

// The work of a session that decides what memory the threads of a CPU take for themselves.
struct ThreadWork {
  KvShape shape;
  std::int64_t context = 0;           // tokens of a sequence
  std::int64_t chunk = 0;             // most tokens per step of a prompt; 0: there are none
  std::vector<WeightShape> products;  // by every matrix of the model; none: the caller multiplies
  bool lists_pages = false;           // a prompt attends to listed pages (Policy::Prefill::pages)
  bool sums_columns = false;          // or chooses its important tokens (Policy::Prefill::tau)
};

class Backend : public Memory {
 public:
  virtual const BackendInfo& info() const = 0;

  // The most resident memory that the threads take for such work beside what is charged: stacks and
  // scratch, which they keep. 0 for a backend whose threads are not the host's.
  virtual std::uint64_t thread_bytes(const ThreadWork& /*work*/) const { return 0; }

  // Any number of them. Throws Error{usage} for a stream that is not the backend's device's, and
  // Error{memory} as allocate() does.
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
  // What weights are stored in, if as dense rows: such a one can also be a table for embed().
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
  std::shared_ptr<const void> life_ = std::make_shared<char>();  // that queues look at
};

}  // namespace sluice
