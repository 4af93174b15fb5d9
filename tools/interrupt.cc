#include "tools/interrupt.h"

#include <csignal>

namespace sluice::tools {
namespace {

// A signal handler can reach nothing but a global.
std::atomic<bool> flag{false};
static_assert(std::atomic<bool>::is_always_lock_free);

extern "C" void on_interrupt(int /*signal*/) { flag = true; }

}  // namespace

void watch_interrupts() {
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

const std::atomic<bool>& interrupted() { return flag; }

}  // namespace sluice::tools
