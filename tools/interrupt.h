// Ctrl-C (SIGINT).
#pragma once

#include <atomic>
#include <functional>

namespace sluice::tools {

// From here on Ctrl-C ends the command at once with the exit code 130, because its work cannot
// check a flag often enough.
void end_on_interrupt();

// From here on the first Ctrl-C raises the flag, and the code that checks it ends the command with
// the results so far. After 0.4 seconds without that, or at the second Ctrl-C, it ends at once.
void flag_interrupt();
const std::atomic<bool>& interrupted();

// Returns when there is something to read; false if interrupted() before. Calls `resumed` when the
// process was stopped (Ctrl-Z) and goes on, once keep_on_interrupt() was called.
bool wait_for_input(int descriptor, const std::function<void()>& resumed = {});

// From here on Ctrl-C only raises the flag, until the code that checks it lowers it again. A second
// Ctrl-C before that, or a SIGTERM, ends the command at once and restores the terminal to its
// present state.
void keep_on_interrupt();
void lower_interrupt();

// Lifts the time limit once the flag was seen, for example to write reports.
void take_time();

}  // namespace sluice::tools
