#include "tools/interrupt.h"

#include <poll.h>
#include <pthread.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <ctime>
#include <string_view>
#include <system_error>
#include <thread>

#include "tools/exit_code.h"

namespace sluice::tools {
namespace {

constexpr timespec kPatience = {0, 400'000'000};

// These are global because Ctrl-C is for the whole process.
std::atomic<bool> flag{false};
std::atomic<bool> is_looked_at{false};
std::atomic<bool> has_time{false};
std::atomic<bool> keeps_on{false};
std::atomic<bool> has_terminal{false};
std::atomic<bool> goes_on{false};  // set by SIGCONT, after a stop
termios terminal{};                // written before has_terminal is set

// In the background another process owns the terminal, and setting it would stop this process.
void restore_terminal() {
  if (has_terminal && ::tcgetpgrp(STDIN_FILENO) == ::getpgrp()) {
    ::tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
  }
}

// Runs once: SA_RESETHAND restores the default action, which takes the signal when this returns.
void end_by_signal(int signal) {
  restore_terminal();
  ::raise(signal);
}

[[noreturn]] void end_with(std::string_view message) {
  restore_terminal();
  [[maybe_unused]] const ssize_t ignored = ::write(STDERR_FILENO, message.data(), message.size());
  // No cleanup, because other threads are still running.
  ::_exit(kInterruptedExit);
}

void wait_for(const sigset_t& signals) {
  int signal = 0;
  ::sigwait(&signals, &signal);
}

// Returns true if another signal arrives within kPatience. The wait restarts after a stop.
bool comes_again(const sigset_t& signals) {
  int result = 0;
  do {
    result = ::sigtimedwait(&signals, nullptr, &kPatience);
  } while (result < 0 && errno == EINTR);
  return result >= 0;
}

void watch(const sigset_t& signals) {
  wait_for(signals);
  while (keeps_on) {
    if (flag.exchange(true)) end_with("\nsluice: interrupted\n");
    wait_for(signals);
  }
  if (!is_looked_at) {
    const bool redraws = ::isatty(STDERR_FILENO) != 0;  // there may be a progress bar
    end_with(redraws ? "\r\x1b[Ksluice: interrupted\n" : "sluice: interrupted\n");
  }
  flag = true;
  if (!comes_again(signals) && has_time) wait_for(signals);
  end_with("\nsluice: interrupted; the text above is what was generated until then\n");
}

}  // namespace

// A thread waits for the signal. A handler would run in an arbitrary thread, and only after that
// thread's current system call, which may be populating memory.
void end_on_interrupt() {
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);  // in all threads started from here on
  try {
    std::thread([signals] { watch(signals); }).detach();
  } catch (const std::system_error&) {
    // Without the thread Ctrl-C keeps its default action and ends the process.
    ::pthread_sigmask(SIG_UNBLOCK, &signals, nullptr);
  }
}

void flag_interrupt() { is_looked_at = true; }

const std::atomic<bool>& interrupted() { return flag; }

// Polls in short waits because no signal ends a wait, and an interrupt may come just before one.
bool wait_for_input(int descriptor, const std::function<void()>& resumed) {
  constexpr int kMilliseconds = 100;
  pollfd wanted = {descriptor, POLLIN, 0};
  int ready = 0;
  while (ready == 0 || (ready < 0 && errno == EINTR)) {
    if (flag) return false;
    if (resumed && goes_on.exchange(false)) resumed();
    ready = ::poll(&wanted, 1, kMilliseconds);
  }
  return true;
}

void keep_on_interrupt() {
  if (::tcgetattr(STDIN_FILENO, &terminal) == 0) {
    has_terminal = true;
    struct sigaction action = {};
    action.sa_handler = end_by_signal;
    action.sa_flags = SA_RESETHAND;
    ::sigaction(SIGTERM, &action, nullptr);
    action.sa_handler = [](int) { goes_on = true; };
    action.sa_flags = SA_RESTART;
    ::sigaction(SIGCONT, &action, nullptr);
  }
  keeps_on = true;
}

void lower_interrupt() { flag = false; }

void take_time() { has_time = true; }

}  // namespace sluice::tools
