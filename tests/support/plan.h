// Short helpers for plans of one sequence and for sessions with their own pools.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "cpu/cpu_backend.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "sluice/errors.h"
#include "tests/support/value_basis.h"

namespace sluice::testing {

// `on`: the backend of sessions whose policies select; others run on any backend.
inline KvPlan plan_on(const BackendInfo& on, const KvShape& shape, std::int64_t context,
                      std::int64_t chunk, std::optional<std::uint64_t> device_cap,
                      std::span<const Policy> policies = {}, std::int64_t decode_batch = 1,
                      std::optional<std::uint64_t> cache_memory = std::nullopt) {
  KvRequest request;
  request.shape = shape;
  request.on = on;
  request.context = context;
  request.chunk = chunk;
  request.decode_batch = decode_batch;
  request.policies = policies;
  request.device_cap = device_cap;
  request.cache_memory = cache_memory;
  request.has_value_basis = true;
  return plan_kv(request);
}

// The same on the reference backend.
inline KvPlan plan_of(const KvShape& shape, std::int64_t context, std::int64_t chunk,
                      std::optional<std::uint64_t> device_cap, bool attends_host_rows,
                      std::span<const Policy> policies = {}, std::int64_t decode_batch = 1,
                      std::optional<std::uint64_t> cache_memory = std::nullopt) {
  BackendInfo on;
  on.attends_host_rows = attends_host_rows;
  return plan_on(on, shape, context, chunk, device_cap, policies, decode_batch, cache_memory);
}

// What a CPU backend says of itself.
inline BackendInfo cpu_info() {
  cpu::CpuOptions options;
  options.threads = 1;
  return cpu::CpuBackend(options).info();
}

// The session gets its own queue.
inline KvSession session_of(Backend& backend, const KvPlan& plan,
                            std::span<const Policy> policies = {},
                            const Scorers& scorers = own_scorers()) {
  return KvSession(std::make_shared<KvPool>(backend.make_queue(), plan, policies, scorers,
                                            HostAttender(), DiskSource(),
                                            value_basis_of(plan.shape)));
}

// The smallest device cap at which `plan` does not throw.
inline std::uint64_t least_cap(const std::function<void(std::uint64_t cap)>& plan) {
  std::uint64_t low = 0;
  std::uint64_t high = std::uint64_t{1} << 30;
  while (low + 1 < high) {
    const std::uint64_t middle = (low + high) / 2;
    try {
      plan(middle);
      high = middle;
    } catch (const Error&) {
      low = middle;
    }
  }
  return high;
}

}  // namespace sluice::testing
