// The key index of a session: what is kept of every key so that weights can be estimated without
// reading rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lib/backend.h"
#include "lib/selection.h"
#include "offload/index_layout.h"

namespace sluice {

class KeyIndex {
 public:
  // Allocates everything that `layout` asks for, in `tier`.
  KeyIndex(Backend& backend, const IndexLayout& layout, Tier tier);

  // Pages of `layer` that became whole: first_page and the rows of every KV head from there on.
  void build(int layer, std::int64_t first_page, std::int64_t pages, std::span<const RowSpan> rows);
  // Adds rows to the sums of values, or takes them out again.
  void add_values(int layer, std::span<const RowSpan> rows, bool subtract);

  KeyIndexView view(int layer) const;
  // [kv_heads, head_dim], or null if the layer keeps none.
  const float* value_sums(int layer) const;

  // Throws Error{numeric} naming layer and KV head if a key was NaN or Inf.
  void check_keys();

 private:
  struct Layer {
    Buffer codes;
    Buffer scales;
    Buffer bounds;
    Buffer sums;
    std::int32_t* bad = nullptr;  // [kv_heads], of bad_; null if keys are not looked at
  };

  Backend* backend_;
  IndexLayout layout_;
  std::vector<Layer> layers_;
  Buffer bad_;       // [layers, kv_heads]
  Buffer seen_bad_;  // the host's copy of it
};

}  // namespace sluice
