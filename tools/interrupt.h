// Ctrl-C (SIGINT).
#pragma once

#include <atomic>
#include <functional>

namespace sluice::tools {

// From here on Ctrl-C ends the command at once with the exit code 130: what it computes could not
// look at a flag often enough.
void end_on_interrupt();

// From here on the first Ctrl-C raises the flag, and whoever looks at it ends the command with what
// it has. If that has not happened after 0.4 seconds, or at the second Ctrl-C, it ends at once.
void flag_interrupt();
const std::atomic<bool>& interrupted();

// Returns when there is something to read; false if interrupted() before. Calls `resumed` when the
// process was stopped (Ctrl-Z) and goes on, once keep_on_interrupt() was called.
bool wait_for_input(int descriptor, const std::function<void()>& resumed = {});

// From here on Ctrl-C raises the flag and nothing else, until whoever looks at it lowers it again.
// At another one before that the command ends at once, as it does at a SIGTERM, and leaves the
// terminal as it is now.
void keep_on_interrupt();
void lower_interrupt();

// Whoever looked at the flag has time from here on: for reports, say.
void take_time();

}  // namespace sluice::tools
