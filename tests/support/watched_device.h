// The reference backend with a queue that observes its operations.
#pragma once

#include <memory>

#include "cpu/reference/backend.h"
#include "tests/support/device.h"

namespace sluice::testing {

// `Watch` derives from ReferenceQueue.
template <typename Watch>
class WatchedDevice : public Device {
 public:
  WatchedDevice() : Device(std::make_unique<cpu::ReferenceBackend>()) {
    queue = std::make_unique<Watch>(static_cast<cpu::ReferenceBackend&>(*backend));
  }

  Watch& watch() const { return static_cast<Watch&>(*queue); }
};

}  // namespace sluice::testing
