// Memory that runs out at any allocation, in any thread: the call that met it throws, and engine,
// other sessions and saved sessions are as before.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "sluice/engine.h"
#include "tests/support/fault_sweep.h"
#include "tests/support/small_sessions.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_disk.h"
#include "tests/support/work_under_faults.h"

namespace {

sluice::testing::FailingCall& allocation() {
  static sluice::testing::FailingCall call;
  return call;
}

// Smaller allocations never fail.
std::atomic<std::size_t>& least_size() {
  static std::atomic<std::size_t> bytes = 0;
  return bytes;
}

void* allocate(std::size_t size) noexcept {
  const bool fails = size >= least_size() && allocation().fails();
  return fails ? nullptr : std::malloc(size > 0 ? size : 1);
}
void* allocate_or_throw(std::size_t size) {
  void* const memory = allocate(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// All of them, because under AddressSanitizer the others would be its own.
void* operator new(std::size_t size) { return allocate_or_throw(size); }
void* operator new[](std::size_t size) { return allocate_or_throw(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

// oneDNN loses objects where an allocation of its own fails.
// NOLINTNEXTLINE(*-identifier*): AddressSanitizer asks for this name
extern "C" const char* __lsan_default_suppressions() { return "leak:libdnnl"; }

namespace sluice {
namespace {

using testing::answers_of;
using testing::FaultSweep;
using testing::go_on;
using testing::goes_on_with;
using testing::Logits;
using testing::random_tokens;
using testing::RandomCheckpoint;

EngineConfig threaded(const RandomCheckpoint& model) {
  EngineConfig config = testing::config_of(model);
  config.threads = 2;
  return config;
}

TEST(FailingAllocations, WhileAnEngineIsOpened) {
  const RandomCheckpoint model(1);
  FaultSweep sweep;
  sweep.seed = testing::seed(1);
  sweep.run(allocation(), [&] {
    Engine engine = Engine::open(threaded(model));
    Session session = engine.new_session(testing::options_for(engine, "values"));
    return go_on(session, random_tokens(140, 1));
  });
}

TEST(FailingAllocations, WhileATokenizerIsRead) {
  FaultSweep sweep;
  sweep.seed = testing::seed(2);
  sweep.run(allocation(), [&] {
    const Engine engine = Engine::open(testing::config_for());
    return engine.encode_prompt("Prince Andrew's 7,000 men?");
  });
}

class OfPolicy : public ::testing::TestWithParam<const char*> {};

TEST_P(OfPolicy, InSessionsBesideAnother) {
  const RandomCheckpoint model(2);
  Engine engine = Engine::open(threaded(model));
  Session other = engine.new_session(
      testing::tightly(engine, testing::options_for(engine, GetParam(), 3), false));
  other.prefill(random_tokens(150, 2));
  const auto work = [&] { return answers_of(engine, other); };
  work();
  const std::uint64_t host = engine.memory().host_bytes;  // of what stays: memory of the pool
  FaultSweep sweep;
  sweep.seed = testing::seed(3);
  sweep.check_others = goes_on_with(other);
  sweep.run(allocation(), work);
  EXPECT_EQ(engine.memory().host_bytes, host);
}

INSTANTIATE_TEST_SUITE_P(FailingAllocations, OfPolicy,
                         ::testing::Values("dense", "values", "twilight", "sparq",
                                           "tidaldecode anchors=2", "compact prefill=pages(0.9)",
                                           "quest"));

// Every round parks the index of two sessions, and brings it back.
TEST(FailingAllocations, WhileTheIndexOfOthersMakesRoom) {
  const RandomCheckpoint model(6);
  Engine engine = Engine::open(threaded(model));
  SessionOptions options = testing::options_for(engine, "values", 4);
  options.device_memory = std::uint64_t{256} << 20;
  options.indexed_tokens = testing::kSmallContext;
  Session one = engine.new_session(options);
  Session two = one.sibling();
  ASSERT_GT(one.plan().parked_bytes, 0u);
  one.prefill(random_tokens(1100, 2));
  two.prefill(random_tokens(1000, 3));
  FaultSweep sweep;
  sweep.seed = testing::seed(7);
  sweep.check_others = [first = goes_on_with(one), second = goes_on_with(two)] {
    first();
    second();
  };
  sweep.run(allocation(), [&] { return answers_of(engine, one); });
  const auto returned =
      one.ledger().total(Phase::decode, Tier::host, Tier::device, Cause::index_swap);
  EXPECT_GT(returned.bytes, 0u);
}

TEST(FailingAllocations, WhileASessionIsSavedAndLoaded) {
  const RandomCheckpoint model(3);
  Engine engine = Engine::open(threaded(model));
  const SessionOptions options = testing::options_for(engine, "values");
  Session session = engine.new_session(options);
  session.prefill(random_tokens(280, 1));
  const testing::TempDir dir;
  session.save(dir.path());
  // nlohmann::json allocates where it is destroyed, some words for the manifest.
  least_size() = 256;
  FaultSweep sweep;
  sweep.seed = testing::seed(4);
  sweep.run(allocation(), [&] {
    session.save(dir.path(), "note");
    Session loaded = engine.load_session(dir.path(), options);
    return go_on(loaded, random_tokens(4, 2));
  });
  least_size() = 0;
}

using OnDisk = testing::OnDisk;

TEST_F(OnDisk, FailingAllocationsOfSessions) {
  const RandomCheckpoint model(4);
  EngineConfig config = threaded(model);
  config.disk = DiskConfig{{parent_}, {}};
  Engine engine = Engine::open(config);
  Session other =
      engine.new_session(testing::tightly(engine, testing::options_for(engine, "values", 3), true));
  other.prefill(random_tokens(300, 2));
  FaultSweep sweep;
  sweep.seed = testing::seed(5);
  sweep.check_others = goes_on_with(other);
  sweep.run(allocation(), [&] { return answers_of(engine, other); });
}

TEST(FailingAllocations, InABatcher) {
  const RandomCheckpoint model(5);
  Engine engine = Engine::open(threaded(model));
  FaultSweep sweep;
  sweep.seed = testing::seed(6);
  sweep.run(allocation(), [&] { return testing::batched_answers(engine); });
}

}  // namespace
}  // namespace sluice
