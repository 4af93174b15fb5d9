// A CPU backend with separate device memory, like a GPU's.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/cpu_backend.h"

namespace sluice::testing {

// Weights and activations are in the device tier, rows in host memory cannot be attended in place,
// and scratch memory is allocated from the start.
class FarBackend : public cpu::CpuBackend {
 public:
  static constexpr std::uint64_t kScratchBytes = 1 << 20;

  // `synchronous`: the value reported in BackendInfo; the backend is always synchronous.
  explicit FarBackend(const cpu::CpuOptions& options, const LogitFormat& logits = {},
                      bool synchronous = true)
      : CpuBackend(options),
        info_(CpuBackend::info()),
        scratch_(account(Tier::device), kScratchBytes) {
    info_.name = "far";
    info_.compute_tier = Tier::device;
    info_.attends_host_rows = false;
    info_.synchronous = synchronous;
    info_.logits = logits;
  }

  const BackendInfo& info() const override { return info_; }

 private:
  BackendInfo info_;
  Charge scratch_;
};

}  // namespace sluice::testing
