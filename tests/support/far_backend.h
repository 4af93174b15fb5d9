// A CPU that keeps its memory as a GPU does.
#pragma once

#include <cstdint>
#include <memory>

#include "cpu/cpu_backend.h"

namespace sluice::testing {

// Weights and activations are in the device tier, rows of host memory are not attended in place,
// and there is scratch memory from the start.
class FarBackend : public cpu::CpuBackend {
 public:
  static constexpr std::uint64_t kScratchBytes = 1 << 20;

  // `synchronous`: whether it says that it is, as it is in truth.
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
