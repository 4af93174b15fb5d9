// Exit codes of the command. Scripts rely on them; --help lists them.
#pragma once

#include <stdexcept>

#include "sluice/errors.h"

namespace sluice::tools {

constexpr int kDifferenceExit = 1;  // a check found a difference
constexpr int kUsageExit = 2;
constexpr int kMemoryExit = 8;
constexpr int kInternalExit = 10;
constexpr int kInterruptedExit = 130;  // as shells have it for SIGINT

int exit_code(ErrorCode code);

// Ctrl-C ended a wait for input.
struct Interrupted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace sluice::tools
