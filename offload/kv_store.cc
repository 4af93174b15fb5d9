#include "offload/kv_store.h"

#include <cmath>

namespace sluice {

AttendParams attend_params(const KvShape& shape, const StepRange& step, const Queries& queries) {
  AttendParams params;
  params.q = queries.q;
  params.tokens = step.tokens;
  params.q_stride = queries.stride;
  params.first_query_position = step.first;
  params.shape = shape;
  params.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  params.out = queries.out;
  params.lse = queries.lse;
  return params;
}

Traffic traffic_of(const KvShape& shape, std::int64_t tokens) {
  const std::uint64_t rows =
      static_cast<std::uint64_t>(tokens) * static_cast<std::uint64_t>(shape.kv_heads);
  return {rows, rows * shape.row_bytes()};
}

}  // namespace sluice
