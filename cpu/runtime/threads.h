// Threads of the CPU backend: a fixed number of oneTBB workers on the processors that this process
// may use.
#pragma once

#include <cstdint>
#include <memory>

namespace sluice::cpu {

class Threads {
 public:
  // Starts `count` threads; 0: Topology::threads. Throws Error{unsupported} if the system refuses
  // that many.
  explicit Threads(int count = 0);
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads();

  int count() const { return count_; }

  // Runs body(task) for every task in [0, tasks) on all threads and returns when all are done. The
  // first exception that a task throws is rethrown here. `bytes` is the total that the tasks read.
  // Below kMinSharedBytes the calling thread does all the work, because below some tens of KiB
  // waking another thread takes longer than the work, and far longer on a busy machine.
  template <typename Body>
  void for_each(std::int64_t tasks, const Body& body, std::int64_t bytes = kAlwaysShared) {
    if (tasks == 1 || bytes < kMinSharedBytes) {
      for (std::int64_t task = 0; task < tasks; ++task) body(task);
      return;
    }
    run(
        tasks,
        [](const void* context, std::int64_t task) { (*static_cast<const Body*>(context))(task); },
        &body);
  }

  // Runs body(begin, end) over ranges of [0, items) of at least `grain` items each.
  template <typename Body>
  void for_ranges(std::int64_t items, std::int64_t grain, const Body& body) {
    const std::int64_t pieces = pieces_of(items, grain);
    for_each(pieces, [&](std::int64_t piece) {
      body(items * piece / pieces, items * (piece + 1) / pieces);
    });
  }

  // The calling thread's number within the running for_each, in [0, count()).
  static int index();

 private:
  static constexpr std::int64_t kAlwaysShared = std::int64_t{1} << 62;
  static constexpr std::int64_t kMinSharedBytes = 256 * 1024;

  struct Arena;
  using Task = void (*)(const void* context, std::int64_t task);

  // Throws Error{unsupported} like the constructor.
  static void require(int count);
  // Defined in threads_tbb.cc or, for ThreadSanitizer, in threads_plain.cc.
  static std::shared_ptr<Arena> make_arena(int count);
  void run(std::int64_t tasks, Task task, const void* context);
  std::int64_t pieces_of(std::int64_t items, std::int64_t grain) const;

  int count_;
  std::shared_ptr<Arena> arena_;
};

}  // namespace sluice::cpu
