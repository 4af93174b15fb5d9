// How one session keeps its rows: in host memory alone, or with a device tier in front of it.
#pragma once

#include <cstdint>
#include <memory>

#include "lib/backend.h"
#include "sluice/kv_cache.h"
#include "sluice/ledger.h"

namespace sluice {

// The rows of one step: positions [first, first + tokens).
struct StepRange {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
  std::int64_t end() const { return first + tokens; }
};

// New rows of one layer, before they are rows. Pointers are the backend's.
struct NewRows {
  const float* k = nullptr;  // [tokens, kv_heads, head_dim], `stride` floats from token to token
  const float* v = nullptr;  // likewise
  std::int64_t stride = 0;
};

// Queries of one step in one layer, and where their attention goes. Pointers are the backend's.
struct Queries {
  const float* q = nullptr;  // [tokens, query_heads, head_dim], `stride` floats between tokens
  std::int64_t stride = 0;
  float* out = nullptr;  // [tokens, query_heads, head_dim]
  float* lse = nullptr;  // [tokens, query_heads]
};

class KvStore {
 public:
  virtual ~KvStore() = default;
  // Makes room; everything that can fail for want of memory fails here.
  virtual void begin(const StepRange& step) = 0;
  virtual void append(int layer, const StepRange& step, const NewRows& rows, Ledger& ledger) = 0;
  virtual void attend(int layer, const StepRange& step, const Queries& queries, Ledger& ledger) = 0;

  // Where single rows are found. Valid from append() to the end of the step.
  virtual RowSource source(int layer, int head) const = 0;
  // The rows from `first`, a position in the page where the step begins or later, to the step's
  // last, one after the other where attention may read them.
  virtual const std::byte* newest(int layer, int head, std::int64_t first) const = 0;
  virtual Tier home_tier() const { return Tier::host; }
  // Rows from `length` on are forgotten; the next step begins there.
  virtual void rewind(std::int64_t length, Ledger& ledger) = 0;
};

// Rows lie in host memory and are attended there.
std::unique_ptr<KvStore> make_in_place_store(Backend& backend, const KvPlan& plan);
// Rows live in host memory; attention sees only what is copied into the device tier.
std::unique_ptr<KvStore> make_tiered_store(Backend& backend, const KvPlan& plan);

// Fills the fields of AttendParams that do not depend on where the rows are.
AttendParams attend_params(const KvShape& shape, const StepRange& step, const Queries& queries);

// What `tokens` rows of every KV head of a layer amount to.
Traffic traffic_of(const KvShape& shape, std::int64_t tokens);

}  // namespace sluice
