// A CPU backend whose queues run their work later, like a GPU's, in an order that a seed decides.
//
// Work waits in its queue until something needs its result, or runs earlier by chance. Queues are
// independent of each other except for wait_for(). As with CUDA, memory that the backend allocated
// or registered is read and written when the work runs, other memory before copy() returns; arrays
// of parameters belong to the caller again when a call returns.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_queue.h"
#include "lib/check.h"
#include "tests/support/random.h"

namespace sluice::testing {

class LateQueue;

class LateBackend : public cpu::CpuBackend {
 public:
  LateBackend() : CpuBackend(one_thread()) {}

  // Restarts the random order with a seed.
  void begin(std::uint64_t seed) {
    random_ = Random(seed);
    refuse_after = -1;
    refused = most_waiting = 0;
  }

  // One thread, so that sums do not depend on the machine's load.
  static cpu::CpuOptions one_thread() {
    cpu::CpuOptions options;
    options.threads = 1;
    return options;
  }

  using Backend::make_queue;
  inline std::unique_ptr<Queue> make_queue(const QueueOptions& options) override;

  void register_host(std::byte* data, std::size_t bytes) override {
    known_.push_back({data, bytes});
  }
  void unregister_host(std::byte* data) noexcept override { forget(data); }

  bool knows(const std::byte* data) const {
    return std::any_of(known_.begin(), known_.end(), [&](std::span<const std::byte> block) {
      return data >= block.data() && data < block.data() + block.size();
    });
  }

  // Runs one item of a random queue that can go on; returns false if there is none.
  inline bool do_something();
  // Runs a random number of items: none, some or all that can run.
  inline void pass_time();

  // True: replay() records the work of one queue, which then runs as it was recorded.
  bool records = false;
  // Items that may still be submitted before one is refused with std::bad_alloc; -1: no limit.
  std::int64_t refuse_after = -1;
  std::int64_t refused = 0;
  std::int64_t most_waiting = 0;  // items in one queue at a time

 private:
  friend class LateQueue;

  std::byte* take(Tier tier, std::size_t bytes) override {
    std::byte* const data = CpuBackend::take(tier, bytes);
    known_.push_back({data, bytes});
    return data;
  }
  void give_back(Tier tier, std::byte* data, std::size_t bytes) noexcept override {
    forget(data);
    CpuBackend::give_back(tier, data, bytes);
  }
  void forget(const std::byte* data) noexcept {
    std::erase_if(known_, [&](const auto& block) { return block.data() == data; });
  }

  Random random_{0};
  std::vector<std::span<const std::byte>> known_;
  std::vector<LateQueue*> queues_;
};

class LateQueue : public cpu::CpuQueue {
 public:
  explicit LateQueue(LateBackend& backend) : CpuQueue(backend), late_(&backend) {
    late_->queues_.push_back(this);
  }
  ~LateQueue() override {
    finish();
    std::erase(late_->queues_, this);
  }

  void submit(const Operation& operation) override {
    if (is_aside_) return side_->submit(operation);
    std::visit([this](const auto* params) { ask(*params); }, operation);
  }
  void call_host(HostCall& call) override {
    if (is_aside_) return side_->call_host(call);
    later([&call] { call.run(); });
  }
  void note_time(std::uint64_t* to) override {
    later([this, to] { CpuQueue::note_time(to); });
  }

  void replay(std::unique_ptr<Recording>& recording, const std::function<void()>& issue) override {
    if (!late_->records) return issue();
    if (recording == nullptr) {
      auto fresh = std::make_unique<Recorded>();
      recorded_ = &fresh->works;
      try {
        issue();
      } catch (...) {
        recorded_ = nullptr;
        throw;
      }
      recorded_ = nullptr;
      recording = std::move(fresh);
    }
    for (const auto& work : dynamic_cast<Recorded&>(*recording).works) later(work);
  }

  // Branches are work of another queue, and part of a recording in its order.
  void prepare_branches() override {
    if (side_ == nullptr) side_ = std::make_unique<LateQueue>(*late_);
  }
  void branch(int number, const std::function<void()>& issue) override {
    if (recorded_ != nullptr || side_ == nullptr) return issue();
    side_->wait_for(*this);
    is_aside_ = true;
    const auto end = [&] {
      is_aside_ = false;
      ends_[static_cast<std::size_t>(number)] = side_->asked_;
    };
    try {
      issue();
    } catch (...) {
      end();
      throw;
    }
    end();
  }
  void join(int number) override {
    if (recorded_ != nullptr || side_ == nullptr) return;
    wait_until(*side_, ends_[static_cast<std::size_t>(number)]);
  }

  void wait_for(Queue& other) override {
    check(recorded_ == nullptr, "work of two queues cannot be recorded here");
    auto& late = static_cast<LateQueue&>(other);
    wait_until(late, late.asked_);
  }
  void synchronize() override {
    finish();
    if (side_ != nullptr) side_->synchronize();
    check(waiting_.empty(), "queues that wait for each other");
  }

 private:
  friend class LateBackend;

  struct Recorded : Recording {
    std::vector<std::function<void()>> works;
  };
  // Either work, or the point that another queue must reach before this one goes on.
  struct Item {
    std::function<void()> work;
    const LateQueue* other = nullptr;
    std::int64_t until = 0;
  };

  // Defers one operation. Its host arrays are copied, so they are the caller's when this returns.
  template <class Params>
  void ask(const Params& params) {
    Params copy = params;
    Kept kept;
    keep(copy, kept);
    later([this, copy, kept] { CpuQueue::submit(Operation(&copy)); });
  }
  // Runs at once, because the caller waits for results in its own host arrays.
  void ask(const SampleParams& params) {
    finish();
    CpuQueue::submit(Operation(&params));
  }
  void ask(const CopyParams& params) {
    for (const CopyOp& op : params.ops) {
      if (!late_->knows(op.to) && !is_working_) {
        finish();
        copy_now(op);
      } else if (!late_->knows(op.from)) {
        later([this, op, bytes = std::vector(op.from, op.from + op.bytes)] {
          copy_now({op.to, bytes.data(), op.bytes});
        });
      } else {
        later([this, op] { copy_now(op); });
      }
    }
  }
  void copy_now(const CopyOp& op) {
    const CopyParams params = {{&op, 1}};
    CpuQueue::submit(Operation(&params));
  }

  using Kept = std::vector<std::shared_ptr<const void>>;
  // Copies a host array and points the parameters at the copy.
  template <class T>
  static void own(std::span<T>& array, Kept& kept) {
    const auto copy =
        std::make_shared<std::vector<std::remove_const_t<T>>>(array.begin(), array.end());
    array = *copy;
    kept.push_back(copy);
  }
  static void own(const SelectionView*& view, Kept& kept) {
    if (view == nullptr) return;
    const auto copy = std::make_shared<const SelectionView>(*view);
    view = copy.get();
    kept.push_back(copy);
  }
  template <class Params>
  static void keep(Params& /*without host arrays*/, Kept& /*kept*/) {}
  static void keep(AppendParams& p, Kept& kept) {
    own(p.rows, kept);
    own(p.host, kept);
  }
  static void keep(AttendParams& p, Kept& kept) { own(p.rows, kept); }
  static void keep(SumValuesParams& p, Kept& kept) { own(p.rows, kept); }
  static void keep(BuildIndexParams& p, Kept& kept) { own(p.rows, kept); }
  static void keep(BuildValuesParams& p, Kept& kept) { own(p.rows, kept); }
  static void keep(ColumnSumsParams& p, Kept& kept) {
    own(p.rows, kept);
    own(p.positions, kept);
  }
  static void keep(ChooseTokensParams& p, Kept& kept) { own(p.probes, kept); }
  static void keep(EstimateParams& p, Kept& kept) { own(p.candidates, kept); }
  static void keep(SelectParams& p, Kept& kept) { own(p.candidates, kept); }

  void later(std::function<void()> work) {
    if (is_working_) return work();  // part of the work that is running
    if (recorded_ != nullptr) return recorded_->push_back(std::move(work));
    if (late_->refuse_after == 0) {
      late_->refuse_after = -1;
      ++late_->refused;
      throw std::bad_alloc();
    }
    if (late_->refuse_after > 0) --late_->refuse_after;
    waiting_.push_back({std::move(work), nullptr, 0});
    ++asked_;
    late_->most_waiting = std::max<std::int64_t>(late_->most_waiting, std::ssize(waiting_));
    late_->pass_time();
  }

  void wait_until(const LateQueue& other, std::int64_t item) {
    waiting_.push_back({{}, &other, item});
    ++asked_;
    late_->pass_time();
  }

  bool can_go_on() const {
    if (waiting_.empty()) return false;
    const Item& next = waiting_.front();
    return next.other == nullptr || next.other->done_ >= next.until;
  }
  void go_on() {
    const Item next = std::move(waiting_.front());
    waiting_.pop_front();
    is_working_ = true;
    if (next.work) next.work();
    is_working_ = false;
    ++done_;
  }
  // Empties this queue; other queues may advance, too.
  void finish() {
    while (!waiting_.empty() && late_->do_something()) {
    }
  }

  LateBackend* late_;
  std::deque<Item> waiting_;
  std::vector<std::function<void()>>* recorded_ = nullptr;  // null: nothing is being recorded
  std::int64_t asked_ = 0;
  std::int64_t done_ = 0;
  bool is_working_ = false;
  std::unique_ptr<LateQueue> side_;  // of branches
  bool is_aside_ = false;            // work is issued to side_
  std::array<std::int64_t, 2> ends_ = {};
};

std::unique_ptr<Queue> LateBackend::make_queue(const QueueOptions& /*options*/) {
  return std::make_unique<LateQueue>(*this);
}

bool LateBackend::do_something() {
  std::vector<LateQueue*> ready;
  std::copy_if(queues_.begin(), queues_.end(), std::back_inserter(ready),
               [](const LateQueue* queue) { return queue->can_go_on(); });
  if (ready.empty()) return false;
  ready[static_cast<std::size_t>(random_.integer(0, std::ssize(ready) - 1))]->go_on();
  return true;
}

void LateBackend::pass_time() {
  const std::int64_t most = random_.integer(0, 15) == 0 ? 1000 : random_.integer(0, 2);
  for (std::int64_t i = 0; i < most && do_something(); ++i) {
  }
}

}  // namespace sluice::testing
