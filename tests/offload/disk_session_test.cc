// Sessions whose rows lie on disk answer as sessions with all rows in host memory do, and read from
// disk what the ledger says.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cpu/cpu_backend.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "offload/step/kv_session.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/test_disk.h"
#include "tests/support/twin_sessions.h"

namespace sluice {
namespace {

using testing::Script;

const KvShape kShape{3, 8, 2, 32, DType::bf16};
constexpr std::int64_t kContext = 700;

enum class DeviceTier { own, shared };

// The least that suffices, and `more` bytes in each tier.
KvPlan plan_of(const KvShape& shape, const Policy& policy, DeviceTier device, std::uint64_t more) {
  KvRequest request;
  request.shape = shape;
  request.context = kContext;
  request.chunk = 64;
  request.sequences = 4;
  request.policies = {&policy, 1};
  request.attends_host_rows = true;
  request.disk = DiskRoom();
  if (device == DeviceTier::own) request.device_cap = std::uint64_t{1} << 40;
  request.disk->host_cap = std::uint64_t{1} << 40;
  const auto halve = [&](std::uint64_t& cap) {
    std::uint64_t refused = 0;
    while (cap - refused > 1) {
      const std::uint64_t middle = refused + (cap - refused) / 2;
      const std::uint64_t was = std::exchange(cap, middle);
      try {
        plan_kv(request);
      } catch (const Error&) {
        refused = middle;
        cap = was;
      }
    }
    cap += more;
  };
  if (request.device_cap) halve(*request.device_cap);
  halve(request.disk->host_cap);
  return plan_kv(request);
}

class DiskSessions : public testing::OnDisk {
 protected:
  std::shared_ptr<KvPool> pool(const KvPlan& plan, const Policy& policy) {
    const bool dense = policy == Policy();
    return std::make_shared<KvPool>(backend_.make_queue(), plan,
                                    dense ? std::span<const Policy>() : std::span(&policy, 1),
                                    own_scorers(), HostAttender(), DiskSource{{parent_}});
  }
  // The same plan with all rows in host memory.
  std::shared_ptr<KvPool> in_memory(KvPlan plan, const Policy& policy) {
    plan.on_disk = false;
    return pool(plan, policy);
  }

  cpu::CpuBackend backend_{cpu::CpuOptions{}};
};

class DiskPolicies : public DiskSessions, public ::testing::WithParamInterface<const char*> {
 protected:
  // Dense layers attend to streamed rows in other parts, and sums of values lose tokens in another
  // order, so these differ by rounding.
  float tolerance() const {
    const bool rounds = policy_.is_dense(0) || policy_.is_dense(1) ||
                        policy_.compensates(0, Compensation::mean_value);
    return rounds ? 2e-5f : 0.0f;
  }

  Policy policy_ = parse_policy(GetParam());
};

TEST_P(DiskPolicies, AnswerAsInMemory) {
  const std::uint64_t seed = testing::seed(7);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const DeviceTier device : {DeviceTier::own, DeviceTier::shared}) {
    for (const std::uint64_t more : {0, 60 << 10, 400 << 10}) {
      SCOPED_TRACE(::testing::Message() << "more " << more);
      const KvPlan plan = plan_of(kShape, policy_, device, more);
      testing::play_twins(pool(plan, policy_), in_memory(plan, policy_), seed,
                          {.tolerance = tolerance()});
      if (HasFatalFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, DiskPolicies,
                         ::testing::Values("dense",
                                           "select=int4 prune=top_p(0.8) sinks=2 recent=16",
                                           "select=sparq(r=8) prune=top_k(40) recent=10 "
                                           "compensate=mean_value",
                                           "select=quest candidates=1/2 prune=top_p(0.9)",
                                           "select=streaming sinks=4 recent=300",
                                           "select=int4 prune=top_k(50) anchors=0",
                                           "select=int4 prune=top_k(50) dense=1",
                                           "select=int4 prune=top_k(16) compensate=values"));

}  // namespace
}  // namespace sluice
