#include "tools/interrupt.h"

#include <unistd.h>

#include <csignal>
#include <ctime>
#include <string_view>

#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr timespec kPatience = {0, 400'000'000};

// Signal handlers can reach nothing but globals.
std::atomic<bool> flag{false};
std::atomic<bool> on_terminal{false};
std::atomic<timer_t> deadline{};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<timer_t>::is_always_lock_free);

// Handlers may call little: no stream, no allocation.
[[noreturn]] void end_with(std::string_view message) {
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, message.data(), message.size());
  ::_exit(static_cast<int>(ErrorCode::interrupted));
}

void set_deadline(const timespec& after) {
  const itimerspec once = {{}, after};
  ::timer_settime(deadline, 0, &once, nullptr);
}

// Over a progress bar, if there is one.
extern "C" void on_interrupt(int /*signal*/) {
  end_with(on_terminal ? "\r\x1b[Ksluice: interrupted\n" : "sluice: interrupted\n");
}

extern "C" void on_deadline(int /*signal*/) {
  end_with("\nsluice: interrupted; the text above is what was generated until then\n");
}

extern "C" void on_flagged_interrupt(int signal) {
  if (flag.exchange(true)) on_deadline(signal);
  set_deadline(kPatience);
}

void handle(int signal, void (*handler)(int)) {
  struct sigaction action = {};
  action.sa_handler = handler;
  // What the command was waiting for goes on.
  action.sa_flags = SA_RESTART;
  ::sigaction(signal, &action, nullptr);
}

}  // namespace

void end_on_interrupt() {
  on_terminal = ::isatty(STDERR_FILENO) != 0;
  handle(SIGINT, on_interrupt);
}

void flag_interrupt() {
  timer_t timer{};
  sigevent event = {};
  event.sigev_notify = SIGEV_SIGNAL;
  event.sigev_signo = SIGALRM;
  if (::timer_create(CLOCK_MONOTONIC, &event, &timer) != 0) return;
  deadline = timer;
  handle(SIGALRM, on_deadline);
  handle(SIGINT, on_flagged_interrupt);
}

const std::atomic<bool>& interrupted() { return flag; }

void take_time() { set_deadline({}); }

}  // namespace sluice::tools
