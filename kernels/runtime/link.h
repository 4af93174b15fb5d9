// How fast the bus between host memory and a device is.
#pragma once

#include "lib/backend.h"

namespace sluice::cuda {

// Of the current device, measured: takes a few milliseconds, and 8 MiB of pinned and of device
// memory for as long.
LinkRates measure_link();

}  // namespace sluice::cuda
