// A look at the queries, keys and values of a model, as its attention gets them.
#pragma once

#include <cstdint>

#include "sluice/ledger.h"

namespace sluice {

// What one layer of a step attends with and appends, after RoPE, in host memory. The tokens are
// consecutive ones of a session, or in Phase::decode one of each of the sessions of Engine::step(),
// in their order.
struct ObservedRows {
  int layer = 0;
  Phase phase = Phase::prefill;
  std::int64_t tokens = 0;
  std::int64_t stride = 0;   // floats from token to token
  const float* q = nullptr;  // [tokens, query_heads, head_dim]
  const float* k = nullptr;  // [tokens, kv_heads, head_dim]
  const float* v = nullptr;  // [tokens, kv_heads, head_dim]
};

// Gets the rows of every layer of every step, in order, before they are appended; see
// EngineConfig::observer. Rows that are loaded from a saved session are not computed and not
// observed. Pointers are valid during the call. If it throws, so does the call that computes, and
// the sessions of the step have failed.
class RowObserver {
 public:
  RowObserver() = default;
  RowObserver(const RowObserver&) = delete;
  RowObserver& operator=(const RowObserver&) = delete;
  virtual ~RowObserver() = default;

  virtual void observe(const ObservedRows& rows) = 0;
};

}  // namespace sluice
