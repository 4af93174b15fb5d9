#include "engine/run_together.h"

#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace sluice {

void run_together(std::size_t count, const std::function<void(std::size_t)>& work,
                  const std::function<void()>& stop) {
  std::mutex mutex;
  std::exception_ptr error;
  const auto guarded = [&](std::size_t i) {
    try {
      work(i);
    } catch (...) {
      stop();
      const std::lock_guard lock(mutex);
      if (error == nullptr) error = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      while (threads.size() + 1 < count) threads.emplace_back(guarded, threads.size() + 1);
    } catch (const std::system_error&) {
      count = threads.size() + 1;  // the threads that started do the work
    }
    guarded(0);
  }
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace sluice
