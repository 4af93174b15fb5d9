#include "cpu/runtime/threads.h"

#include <algorithm>
#include <latch>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "sluice/errors.h"
#include "sluice/topology.h"

namespace sluice::cpu {

Threads::Threads(int count)
    : count_(count > 0 ? count : detect_topology().threads), arena_(make_arena(count_)) {
  require(count_);
}

Threads::~Threads() = default;

// Starts `count` threads as a test, because oneTBB ends the process if the system refuses one.
void Threads::require(int count) {
  std::latch all_asked(1);
  std::vector<std::jthread> threads;
  std::string refused;
  try {
    while (static_cast<int>(threads.size()) < count - 1) {
      threads.emplace_back([&] { all_asked.wait(); });
    }
  } catch (const std::system_error& error) {
    refused = error.code().message();
  }
  all_asked.count_down();
  if (refused.empty()) return;
  throw Error(ErrorCode::unsupported, "of " + std::to_string(count) +
                                          " threads the system gives this process " +
                                          std::to_string(threads.size() + 1) + " (" + refused +
                                          "); lower `threads`, or raise the limit (ulimit -u)");
}

std::int64_t Threads::pieces_of(std::int64_t items, std::int64_t grain) const {
  return std::clamp<std::int64_t>(items / std::max<std::int64_t>(grain, 1), 1, count_);
}

}  // namespace sluice::cpu
