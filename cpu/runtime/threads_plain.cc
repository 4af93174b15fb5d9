// Standard-library threads, started for every loop, for ThreadSanitizer: it does not see how
// oneTBB's library hands tasks from thread to thread and would report every hand-over.
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/runtime/threads.h"

namespace sluice::cpu {
namespace {

thread_local int own_index = 0;

}  // namespace

struct Threads::Arena {};

std::shared_ptr<Threads::Arena> Threads::make_arena(int /*count*/) {
  return std::make_shared<Arena>();
}

int Threads::index() { return own_index; }

void Threads::run(std::int64_t tasks, Task task, const void* context) {
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr first;
  const auto work = [&](int index) {
    own_index = index;
    try {
      for (std::int64_t i = next++; i < tasks; i = next++) task(context, i);
    } catch (...) {
      next = tasks;
      const std::lock_guard lock(mutex);
      if (first == nullptr) first = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (int i = 1; i < count_; ++i) helpers.emplace_back(work, i);
    work(0);
  }
  if (first != nullptr) std::rethrow_exception(first);
}

}  // namespace sluice::cpu
