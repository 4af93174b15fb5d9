// Measures the bus between host memory and a device.
#pragma once

#include "lib/backend.h"

namespace sluice::cuda {

// Measured rates of the current device. Takes a few milliseconds, and meanwhile 8 MiB each of
// pinned and of device memory.
LinkRates measure_link();

}  // namespace sluice::cuda
