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

  explicit FarBackend(const cpu::CpuOptions& options, const LogitFormat& logits = {})
      : CpuBackend(options),
        info_(CpuBackend::info()),
        scratch_(account(Tier::device), kScratchBytes) {
    info_.name = "far";
    info_.compute_tier = Tier::device;
    info_.attends_host_rows = false;
    info_.logits = logits;
  }

  const BackendInfo& info() const override { return info_; }

 private:
  BackendInfo info_;
  Charge scratch_;
};

}  // namespace sluice::testing
