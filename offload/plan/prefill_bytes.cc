#include "offload/plan/prefill_bytes.h"

#include <algorithm>

#include "lib/bytes.h"

namespace sluice {
namespace {

std::int64_t pages_of(std::int64_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace

ImportantTokenBytes::ImportantTokenBytes(const IndexLayout& layout) {
  const KvShape& shape = layout.shape;
  const std::int64_t width = std::int64_t{shape.query_heads} * shape.head_dim;
  const std::int64_t packed_tokens = layout.evicts ? std::min(kPackedTokens, layout.context) : 0;
  probe_queries = bytes_of((kNewestProbes + kRandomProbes) * width, sizeof(float));
  sums = bytes_of(layout.context, sizeof(float));
  listed = bytes_of(layout.context, 1);
  positions = seen = bytes_of(layout.context, sizeof(std::int32_t));
  packed = bytes_of(packed_tokens * width, sizeof(float));
  packed_lse = bytes_of(packed_tokens * shape.query_heads, sizeof(float));
  table = layout.evicts ? bytes_of(layout.pages(), sizeof(PageSlots)) : 0;
  bad = sizeof(std::int32_t);
}

std::uint64_t ImportantTokenBytes::work() const {
  return probe_queries + sums + listed + positions + seen + 2 * packed + packed_lse + table;
}

ListedPageBytes::ListedPageBytes(const KvPlan& plan) {
  if (plan.listed_blocks == 0) return;
  const KvShape& shape = plan.shape;
  const std::int64_t pages_of_heads = shape.kv_heads * pages_of(plan.context);
  means = bytes_of(shape.layers * plan.sequences * shape.head_dim * pages_of_heads,
                   sizeof(std::uint16_t));
  pages = bytes_of(plan.listed_blocks * pages_of_heads, sizeof(std::int32_t));
  counts = bytes_of(plan.listed_blocks * shape.kv_heads, sizeof(std::int32_t));
  listed = bytes_of(shape.layers * pages_of_heads, sizeof(std::uint32_t));
}

}  // namespace sluice
