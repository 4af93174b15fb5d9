#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "cpu/runtime/threads.h"

namespace sluice::cpu {

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

std::shared_ptr<Threads::Arena> Threads::make_arena(int count) {
  return std::make_shared<Arena>(count);
}

int Threads::index() { return std::max(0, tbb::this_task_arena::current_thread_index()); }

// Each worker starts with a fixed task, the same in every loop of equal length, and then takes the
// remaining tasks one by one. If sixteen workers steal all tasks instead, a loop takes up to 30 us
// longer.
void Threads::run(std::int64_t tasks, Task task, const void* context) {
  const std::int64_t workers = std::min<std::int64_t>(tasks, count_);
  std::atomic<std::int64_t> next = workers;
  const auto work = [&](std::int64_t first) {
    for (std::int64_t i = first; i < tasks; i = next++) task(context, i);
  };
  arena_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::int64_t>(0, workers, 1),
        [&](const tbb::blocked_range<std::int64_t>& range) {
          try {
            for (std::int64_t i = range.begin(); i != range.end(); ++i) work(i);
          } catch (...) {
            next = tasks;
            throw;
          }
        },
        tbb::static_partitioner());
  });
}

}  // namespace sluice::cpu
