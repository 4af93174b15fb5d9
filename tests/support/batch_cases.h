// Policies and plans under which several sessions share a pool.
#pragma once

#include <array>
#include <optional>
#include <span>

#include "offload/plan/planner.h"
#include "tests/support/plan.h"

namespace sluice::testing {

// Ways to select, prune and compensate, in all layers and in some.
inline constexpr std::array kBatchPolicies = {
    "dense",
    "select=exact prune=top_k(64)",
    "select=int4 prune=top_p(0.8) sinks=2 recent=16",
    "select=int4 bits=2 prune=top_k(40)",
    "select=sparq candidates=1/4 prune=top_k(16) bits=3 0:bits=4",
    "select=sparq(r=8) prune=top_k(40) recent=10 compensate=mean_value",
    "select=quest prune=top_k(64)",
    "select=streaming sinks=4 recent=60",
    "select=sparq candidates=1/4 prune=top_p(0.9) cap=50 compensate=mean_value",
    "select=quest candidates=1/2 prune=top_p(0.9)",
    "select=int4 prune=top_k(50) dense=0 anchors=1",
    "select=exact prune=top_k(50) dense=0 anchors=1 anchors_attend=all",
    "select=int4 prune=top_k(16) compensate=values",
    "select=int4 prune=top_k(16) compensate=values early=half",
    "select=int4 bits=2 prune=top_k(16) compensate=values(components=half) 0:bits=3",
    "sluice cap=40 early=layer 1:early=none",
    "select=quest prune=top_k(50) dense=0 anchors=1 early=half",
    "select=sparq candidates=1/4 prune=top_p(0.9) cap=50 compensate=values(bits=3,pages=0.5)",
    "sluice cap=40 0:bits=2 1:cap=8 1:compensate=values(bits=3) 0:compensate=none",
};

// A pool of a shared plan.
inline std::shared_ptr<KvPool> shared_pool(Backend& backend, const KvPlan& plan,
                                           std::span<const Policy> policies) {
  return std::make_shared<KvPool>(backend.make_queue(), plan, policies, own_scorers(),
                                  HostAttender(), DiskSource(), value_basis_of(plan.shape));
}

// `tokens`: total over all sequences; 0: each sequence has the full context.
inline KvPlan shared_plan(const KvShape& shape, std::int64_t context, std::int64_t sequences,
                          std::span<const Policy> policies,
                          std::optional<std::uint64_t> cap = std::nullopt,
                          std::int64_t tokens = 0) {
  KvRequest request;
  request.shape = shape;
  request.context = context;
  request.chunk = 64;
  request.sequences = sequences;
  request.tokens = tokens;
  request.policies = policies;
  request.device_cap = cap;
  request.on = cpu_info();
  request.has_value_basis = true;
  return plan_kv(request);
}

// A cap with device memory for the newest pages and four others.
inline std::uint64_t small_cap(const KvShape& shape, std::int64_t context, std::int64_t sequences,
                               std::span<const Policy> policies) {
  const KvPlan free = shared_plan(shape, context, sequences, policies);
  const std::uint64_t block = kPageTokens * shape.token_bytes();
  return free.index_bytes + free.work_bytes + free.table_bytes +
         (static_cast<std::uint64_t>(sequences) + 4) * block;
}

}  // namespace sluice::testing
