// Plans of one sequence, in short.
#pragma once

#include <optional>
#include <span>

#include "offload/planner.h"

namespace sluice::testing {

inline KvPlan plan_of(const KvShape& shape, std::int64_t context, std::int64_t chunk,
                      std::optional<std::uint64_t> device_cap, bool attends_host_rows,
                      std::span<const Policy> policies = {}, std::int64_t decode_batch = 1) {
  KvRequest request;
  request.shape = shape;
  request.context = context;
  request.chunk = chunk;
  request.decode_batch = decode_batch;
  request.policies = policies;
  request.device_cap = device_cap;
  request.attends_host_rows = attends_host_rows;
  return plan_kv(request);
}

}  // namespace sluice::testing
