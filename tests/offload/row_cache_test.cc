// Sessions with a row cache: they answer as sessions without one, whatever is written, forgotten,
// forked and corrected, and fetch less.
#include "offload/cache/row_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "cpu/cpu_backend.h"
#include "cpu/cpu_queue.h"
#include "tests/support/counting_backend.h"
#include "tests/support/plan.h"
#include "tests/support/random.h"
#include "tests/support/script.h"
#include "tests/support/twin_sessions.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::Random;
using testing::Script;
using testing::step_together;

const KvShape kShape{3, 8, 2, 32, DType::bf16};

KvRequest request_of(std::int64_t context, std::int64_t sequences, const Policy& policy) {
  KvRequest request;
  request.shape = kShape;
  request.context = context;
  request.chunk = 64;
  request.sequences = sequences;
  request.policies = {&policy, 1};
  request.on = testing::cpu_info();
  return request;
}

// The smallest plan that keeps the newest pages on the device and beside them a cache of about so
// many bytes.
KvPlan plan_of(std::int64_t context, std::int64_t sequences, const Policy& policy,
               std::uint64_t cache) {
  KvRequest request = request_of(context, sequences, policy);
  const KvPlan free = plan_kv(request);
  const std::uint64_t page = kPageTokens * kShape.row_bytes() * 6;  // of every layer and KV head
  request.cache_memory = cache;
  request.device_cap = free.index_bytes + free.work_bytes + free.table_bytes +
                       (static_cast<std::uint64_t>(sequences) + 2) * page;
  KvPlan plan = plan_kv(request);
  while (RowCacheBytes(plan).sum() < cache / 4 * 3 && plan.resident_tokens == 0) {
    *request.device_cap += std::uint64_t{8} << 10;
    plan = plan_kv(request);
  }
  return plan;
}

// By layers that select.
std::uint64_t rows_read(const KvSession& session, Tier from, Cause cause) {
  std::uint64_t rows = 0;
  for (int layer = 0; layer < kShape.layers; ++layer) {
    if (session.policy().is_dense(layer)) continue;
    rows += session.ledger().total(Phase::decode, layer, from, Tier::device, cause).rows;
  }
  return rows;
}

// Holds every row that the cache gives out to the one in host memory, and counts what is fetched.
class WatchedQueue : public cpu::CpuQueue {
 public:
  using cpu::CpuQueue::CpuQueue;

  void submit(const Operation& operation) override {
    if (const auto* attend = params_of<AttendSelectedParams>(operation)) watch(*attend);
    CpuQueue::submit(operation);
  }

  std::uint64_t fetched = 0;
  std::uint64_t cached = 0;
  std::uint64_t evicted = 0;  // if no row is forgotten
  std::uint64_t stale = 0;

 private:
  void watch(const AttendSelectedParams& p) {
    for (std::int64_t i = 0; i < p.batch.count * p.shape.kv_heads; ++i) {
      const std::int32_t sequence = p.batch.tokens[i / p.shape.kv_heads].sequence;
      for (std::int64_t at = i * p.selected.capacity;
           at < i * p.selected.capacity + p.selected.heads[i].count; ++at) {
        const std::int32_t position = p.selected.positions[at];
        const bool on_device =
            p.rows.page(sequence, position / kPageTokens).device != PageSlots::kNone;
        const bool is_cached = p.places != nullptr && p.places[at].is_cached();
        if (is_cached) watch(p, i % p.shape.kv_heads, sequence, position, p.places[at].number);
        fetched += !is_cached && !on_device ? 1 : 0;
        cached += is_cached ? 1 : 0;
        if (p.places != nullptr && p.places[at].is_kept()) {
          evicted += filled_.emplace(i % p.shape.kv_heads, p.places[at].place).second ? 0 : 1;
        }
      }
    }
  }

  void watch(const AttendSelectedParams& p, std::int64_t head, std::int32_t sequence,
             std::int32_t position, std::int64_t way) {
    const std::size_t bytes = p.shape.row_bytes();
    const std::byte* const host =
        p.rows.row(sequence, head, position, static_cast<std::int64_t>(bytes));
    const std::byte* const in_cache =
        p.cache.rows + static_cast<std::size_t>(head * p.cache.ways() + way) * bytes;
    stale += std::memcmp(host, in_cache, bytes) != 0 ? 1 : 0;
  }

  std::set<std::pair<std::int64_t, std::int32_t>> filled_;  // KV heads and ways
};

const char* const kPolicies[] = {
    "select=exact prune=top_k(64)",
    "select=int4 prune=top_p(0.8) sinks=2 recent=16",
    "select=sparq(r=8) prune=top_k(40) recent=10 compensate=mean_value",
    "select=quest candidates=1/2 prune=top_p(0.9)",
    "select=streaming sinks=4 recent=300",
    "select=int4 prune=top_k(50) anchors=0",
    "select=int4 prune=top_k(50) dense=1",
    "select=int4 prune=top_p(0.9) anchors=0,1",
    "select=int4 prune=top_k(16) compensate=values",
};

class CachedSessions : public ::testing::TestWithParam<const char*> {
 protected:
  Policy policy_ = parse_policy(GetParam());
};

TEST_P(CachedSessions, AnswerAsWithoutIt) {
  const std::int64_t context = 700;
  const std::uint64_t seed = testing::seed(7);
  SCOPED_TRACE(testing::seed_message(seed));
  for (const std::uint64_t cache : {std::uint64_t{60} << 10, std::uint64_t{120} << 10}) {
    cpu::CpuBackend backend{cpu::CpuOptions{}};
    const auto queue = std::make_shared<WatchedQueue>(backend);
    // The same pieces of attention, but for the cache.
    KvPlan plan = plan_of(context, 4, policy_, cache);
    ASSERT_GT(plan.cache_rows, 0);
    const auto cached = std::make_shared<KvPool>(queue, plan, std::span(&policy_, 1));
    plan.cache_rows = 0;
    const auto plain = std::make_shared<KvPool>(queue, plan, std::span(&policy_, 1));
    testing::play_twins(cached, plain, seed, {0.0f, [&] { ASSERT_EQ(queue->stale, 0u); }});
    EXPECT_GT(queue->cached, 0u);
  }
}

// Steps that select the same rows again fetch them once.
TEST_P(CachedSessions, FetchLess) {
  const std::int64_t context = 1500;
  Script script(kShape, context, 3);
  script.repeat_queries();
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  constexpr std::int64_t kSteps = 90;
  constexpr std::uint64_t kCache = std::uint64_t{160} << 10;
  const auto decode = [&](std::uint64_t cache) {
    const auto queue = std::make_shared<WatchedQueue>(backend);
    KvSession session(std::make_shared<KvPool>(queue, plan_of(context, 1, policy_, cache),
                                               std::span(&policy_, 1)));
    script.append(session, 1400);
    script.decode(session, kSteps);
    const std::uint64_t misses = rows_read(session, Tier::host, Cause::miss);
    EXPECT_EQ(misses, queue->fetched) << "rows by the ledger";
    // What was put into the cache is in it or made room.
    const Traffic evicted =
        session.ledger().total(Phase::decode, Tier::device, Tier::device, Cause::evict);
    EXPECT_EQ(evicted.rows, queue->evicted) << "rows by the ledger";
    EXPECT_EQ(evicted.bytes, 0u);
    return std::pair(misses, misses + rows_read(session, Tier::device, Cause::hit));
  };
  const auto [without, all] = decode(0);
  const auto [with, as_many] = decode(kCache);
  const auto ways =
      static_cast<std::uint64_t>(plan_of(context, 1, policy_, kCache).cache_rows * kShape.kv_heads);
  EXPECT_EQ(as_many, all) << "rows attended to";
  // A cache that a step overflows keeps part of what the next one wants.
  EXPECT_LT(with, without / kSteps < ways ? without / 3 : without - kSteps * ways / 4);
  EXPECT_GT(with, 0u);
}

// Runs out of memory while ways that were given out are not filled yet.
class FailingQueue : public WatchedQueue {
 public:
  using WatchedQueue::WatchedQueue;

  void submit(const Operation& operation) override {
    if (fails && params_of<AttendSelectedParams>(operation) != nullptr) throw std::bad_alloc();
    WatchedQueue::submit(operation);
  }

  bool fails = false;
};

TEST_P(CachedSessions, OutliveOthersThatFail) {
  const std::int64_t context = 700;
  const Script script(kShape, context, 3);
  cpu::CpuBackend backend{cpu::CpuOptions{}};
  const auto queue = std::make_shared<FailingQueue>(backend);
  const auto pool = std::make_shared<KvPool>(
      queue, plan_of(context, 2, policy_, std::uint64_t{100} << 10), std::span(&policy_, 1));
  KvSession session(pool);
  script.prefill(session, 500);
  {
    KvSession fork = session.fork();
    queue->fails = true;
    EXPECT_ANY_THROW(script.step(fork, Phase::decode, 1));
    queue->fails = false;
  }
  script.decode(session, 100);
  EXPECT_EQ(queue->stale, 0u);
  EXPECT_GT(queue->cached, 0u);
}

INSTANTIATE_TEST_SUITE_P(Policies, CachedSessions, ::testing::ValuesIn(kPolicies));

TEST(RowCachePlan, TakesWhatItMayAndIsCounted) {
  const Policy policy = parse_policy("select=int4 prune=top_k(20)");
  const KvPlan most = plan_of(2000, 2, policy, 0);
  for (const std::uint64_t cache : {0, 12000, 60000, 200000}) {
    KvRequest request = request_of(2000, 2, policy);
    request.on = CountingBackend().info();
    request.cache_memory = cache;
    request.device_cap = most.device_bytes + 200000;
    const KvPlan plan = plan_kv(request);
    const RowCacheBytes bytes(plan);
    EXPECT_LE(bytes.sum(), cache);
    EXPECT_EQ(plan.cache_rows % RowCacheView::kWays, 0);
    // Eight times what a step of two sequences selects, and no more.
    EXPECT_LE(plan.cache_rows, 8 * 20 * 3 * 2);
    EXPECT_EQ(plan.cache_rows > 0, cache > 0);
    CountingBackend backend(plan.device_bytes);
    KvSession session = testing::session_of(backend, plan, {&policy, 1});
    const Script script(kShape, 300, 5);
    script.prefill(session, 260);
    script.decode(session, 20);
    EXPECT_LE(backend.device_peak, plan.device_bytes);
  }
}

// All rows on the device, or all of them attended in place, or nobody who selects.
TEST(RowCachePlan, HasNoneWhereNothingIsFetched) {
  const Policy policy = parse_policy("select=int4 prune=top_k(20)");
  KvRequest request = request_of(2000, 1, policy);
  EXPECT_EQ(plan_kv(request).cache_rows, 0);
  request.device_cap = std::uint64_t{1} << 40;
  EXPECT_EQ(plan_kv(request).cache_rows, 0);
  request.device_cap = plan_of(2000, 1, policy, 100000).device_bytes;
  EXPECT_GT(plan_kv(request).cache_rows, 0);
  request.on.cached_bytes = std::uint64_t{1} << 20;
  EXPECT_EQ(plan_kv(request).cache_rows, 0) << "too few rows to gain by it";
  request.cache_memory = 50000;
  EXPECT_GT(plan_kv(request).cache_rows, 0) << "but it was asked for";
  request.cache_memory.reset();
  request.on.cached_bytes = 0;
  request.policies = {};
  EXPECT_EQ(plan_kv(request).cache_rows, 0);
}

// A step fetches what all its tokens select.
TEST(RowCachePlan, CountsEveryTokenOfAStep) {
  const Policy policy = parse_policy("select=int4 prune=top_k(20)");
  const auto has_cache = [&](std::int64_t sequences, std::uint64_t cached_bytes) {
    KvRequest request = request_of(2000, sequences, policy);
    request.device_cap = plan_of(2000, sequences, policy, 100000).device_bytes;
    request.on.cached_bytes = cached_bytes;
    return plan_kv(request).cache_rows > 0;
  };
  std::uint64_t enough = 1;
  while (has_cache(1, 2 * enough)) enough *= 2;
  EXPECT_TRUE(has_cache(4, 2 * enough));
  EXPECT_FALSE(has_cache(4, 8 * enough));
}

// Rows of all layers have tags, and none is that of an empty way.
TEST(RowCacheView, TagsTellAllRowsApart) {
  RowCacheView view;
  view.host_rows = std::numeric_limits<std::uint32_t>::max() / 32;
  ASSERT_TRUE(RowCacheView::fits(32, view.host_rows));
  EXPECT_FALSE(RowCacheView::fits(32, view.host_rows + 1));
  const auto last = static_cast<std::int32_t>(view.host_rows - 1);
  for (const int layer : {0, 1, 31}) {
    for (const std::int32_t host : {0, 1, last}) {
      EXPECT_LT(view.tag(layer, host), RowCacheView::kNothing - 1);
      EXPECT_EQ(view.tag(layer, host) / view.host_rows, layer);
      EXPECT_EQ(view.host_of(view.tag(layer, host)), host);
    }
  }
}

}  // namespace
}  // namespace sluice
