// SIGINT as a flag: the first asks the command to end cleanly, the second ends it at once.
#pragma once

#include <atomic>

namespace sluice::tools {

void watch_interrupts();
const std::atomic<bool>& interrupted();

}  // namespace sluice::tools
