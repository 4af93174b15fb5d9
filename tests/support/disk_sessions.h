// Sessions whose rows lie on disk, under the smallest plans, and the same with all rows in host
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "cpu/cpu_backend.h"
#include "offload/plan/planner.h"
#include "offload/step/kv_pool.h"
#include "sluice/errors.h"
#include "tests/support/late_backend.h"
#include "tests/support/plan.h"
#include "tests/support/test_disk.h"

namespace sluice::testing {

class DiskSessions : public OnDisk {
 protected:
  static constexpr KvShape kShape{4, 8, 2, 32, DType::bf16};
  static constexpr std::int64_t kContext = 700;

  enum class DeviceTier { own, shared };

  // The least that suffices, `more` bytes in each tier, and at least this many blocks in host
  // memory.
  static KvPlan plan_of(const KvShape& shape, const Policy& policy, DeviceTier device,
                        std::uint64_t more, std::int64_t blocks_in_host = 0) {
    KvRequest request;
    request.shape = shape;
    request.context = kContext;
    request.chunk = 64;
    request.sequences = 4;
    request.policies = {&policy, 1};
    request.on = cpu_info();
    request.disk = DiskRoom();
    if (device == DeviceTier::own) request.device_cap = std::uint64_t{1} << 40;
    request.disk->host.cap = std::uint64_t{1} << 40;
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
    halve(request.disk->host.cap);
    while (plan_kv(request).host_blocks < blocks_in_host) request.disk->host.cap += 64 << 10;
    return plan_kv(request);
  }

  std::shared_ptr<KvPool> pool(const KvPlan& plan, const Policy& policy,
                               const DiskFactory& factory = {}) {
    const bool dense = policy == Policy();
    return std::make_shared<KvPool>(
        backend_.make_queue(), plan, dense ? std::span<const Policy>() : std::span(&policy, 1),
        own_scorers(), HostAttender(), DiskSource{{parent_}, DiskAccess::automatic, factory});
  }
  // The same plan with all rows in host memory.
  std::shared_ptr<KvPool> in_memory(KvPlan plan, const Policy& policy) {
    plan.on_disk = false;
    return pool(plan, policy);
  }

  cpu::CpuBackend backend_{LateBackend::one_thread()};
};

}  // namespace sluice::testing
