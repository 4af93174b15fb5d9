// Several threads that begin at the same time.
#pragma once

#include <functional>
#include <latch>
#include <thread>
#include <vector>

namespace sluice::testing {

// Calls body(i) for i below `count`, each in a thread of its own, and waits for all. What a body
// throws ends the program.
inline void together(int count, const std::function<void(int)>& body) {
  std::latch all(count);
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      all.arrive_and_wait();
      body(i);
    });
  }
}

}  // namespace sluice::testing
