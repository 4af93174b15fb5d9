#include "cpu/threads.h"

#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <latch>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "sluice/errors.h"
#include "sluice/topology.h"

namespace sluice::cpu {
namespace {

// oneTBB ends the process when the system denies it a thread, so that is found out before.
void require_threads(int count) {
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

}  // namespace

struct Threads::Arena {
  explicit Arena(int count) : arena(count) {
    // oneTBB stops at one thread per core unless told otherwise; telling it less than that would
    // limit the rest of the process.
    if (count > tbb::info::default_concurrency()) {
      limit.emplace(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(count));
    }
  }
  std::optional<tbb::global_control> limit;
  tbb::task_arena arena;
};

Threads::Threads(int count)
    : count_(count > 0 ? count : detect_topology().usable_cores),
      arena_(std::make_unique<Arena>(count_)) {
  require_threads(count_);
}

Threads::~Threads() = default;

int Threads::index() { return std::max(0, tbb::this_task_arena::current_thread_index()); }

void Threads::run(std::int64_t tasks, Task task, const void* context) {
  arena_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::int64_t>(0, tasks, 1),
        [&](const tbb::blocked_range<std::int64_t>& range) {
          for (std::int64_t i = range.begin(); i != range.end(); ++i) task(context, i);
        },
        tbb::simple_partitioner());
  });
}

std::int64_t Threads::pieces_of(std::int64_t items, std::int64_t grain) const {
  return std::clamp<std::int64_t>(items / std::max<std::int64_t>(grain, 1), 1, count_);
}

}  // namespace sluice::cpu
