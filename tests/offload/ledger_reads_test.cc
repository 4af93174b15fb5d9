// The ledger's reads are those that happened: the reference backend tells of every row and every
// page of the index that it reads, and of every key that an estimate looks at. It reads as the CPU
// does, or as a GPU does that reads tiles whole and what a KV head's queries share more than once.
// A TrafficCounter, which counts from the parameters of operations, agrees with both.
#include <gtest/gtest.h>

#include <map>

#include "cpu/cpu_backend.h"
#include "lib/counted_queue.h"
#include "tests/support/counting_backend.h"
#include "tests/support/script.h"
#include "tests/support/value_basis.h"

namespace sluice {
namespace {

using testing::CountingBackend;
using testing::Script;
using testing::step_together;

// Every preset, and every method by itself and with what changes its reads.
const char* const kPolicies[] = {
    "dense",
    "streaming sinks=4 recent=200",
    "quest prune=top_k(64) dense=0",
    "sparq",
    "twilight dense=0",
    "select=int4 prune=top_k(64) dense=0 anchors=1",
    "tidaldecode prune=top_k(64) dense=none anchors=0",
    "zipvl",
    "select=int4 prune=top_k(40) prefill=pages(0.8)",
    "sluice",
    "select=exact prune=top_k(64)",
    "select=exact candidates=1/4 prune=top_p(0.9) cap=64",
    "select=exact candidates=1/8 prune=top_k(16)",
    "select=int4 prune=top_p(0.8) sinks=2 recent=16",
    "select=int4 bits=2 prune=top_k(40)",
    "select=int4 candidates=1/8 prune=top_k(16)",
    "select=sparq(r=8) candidates=1/4 prune=top_p(0.9) cap=50 bits=2",
    "select=sparq(r=8) candidates=1/4 prune=top_p(0.9) cap=50 bits=3",
    "select=int4 bits=3 prune=top_k(16) compensate=values 0:bits=4 1:bits=2",
    "select=quest prune=top_k(1/4) compensate=none",
    "select=int4 prune=top_k(16) compensate=values",
    "select=int4 bits=1 prune=top_k(16) compensate=values(bits=1,pages=0.8) 0:bits=2",
    "select=sparq(r=8) candidates=1/4 prune=top_k(16) compensate=values(bits=3,pages=0.5)",
    "select=int4 prune=none compensate=values(bits=4,pages=1) dense=0 anchors=1",
    "select=int4 prune=top_k(16) compensate=values early=half",
    "select=int4 bits=2 prune=top_k(16) compensate=values(components=half,pages=0.8)",
    "sparq early=layer",
    "select=int4 candidates=1/8 prune=top_p(0.9) cap=20 early=half",
    "tidaldecode prune=top_k(64) dense=none anchors=0 early=half",
    "sluice cap=40 0:bits=2 1:cap=8 1:compensate=values(bits=3) 0:compensate=none",
};

struct Reads {
  std::uint64_t rows = 0;
  std::uint64_t index_bytes = 0;
  std::uint64_t value_bytes = 0;  // of value tiles
  std::uint64_t crossed = 0;      // from host memory to the device

  friend bool operator==(const Reads&, const Reads&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Reads& reads) {
    return out << reads.rows << " rows, " << reads.index_bytes << " B of the index, "
               << reads.value_bytes << " B of value tiles, " << reads.crossed
               << " B from host memory";
  }
};

Reads read_by(const CountingBackend& backend) {
  return {backend.rows_read, backend.index_bytes_read, backend.value_bytes_read,
          backend.host_to_device};
}

Reads operator-(const Reads& a, const Reads& b) {
  return {a.rows - b.rows, a.index_bytes - b.index_bytes, a.value_bytes - b.value_bytes,
          a.crossed - b.crossed};
}

// What the decode steps of sessions say that they read.
Reads told(std::span<KvSession* const> sessions) {
  Reads sum;
  for (const KvSession* session : sessions) {
    const Ledger& ledger = session->ledger();
    for (const Tier from : {Tier::device, Tier::host}) {
      for (const Tier to : {Tier::device, Tier::host}) {
        const auto total = [&](Cause cause) {
          return ledger.total(Phase::decode, from, to, cause);
        };
        sum.rows += total(Cause::hit).rows + total(Cause::miss).rows;
        sum.index_bytes += total(Cause::index_read).bytes;
        sum.value_bytes += total(Cause::value_read).bytes;
      }
    }
    for (const Cause cause : {Cause::miss, Cause::index_read}) {
      sum.crossed += ledger.total(Phase::decode, Tier::host, Tier::device, cause).bytes;
    }
  }
  return sum;
}

// Passes on the ledger's entries since the last call.
class NewEntries {
 public:
  std::vector<LedgerEntry> take(std::span<KvSession* const> sessions) {
    std::vector<LedgerEntry> entries;
    for (const KvSession* session : sessions) {
      std::uint64_t& next = next_[session];
      for (const LedgerStep& step : session->ledger().history()) {
        if (step.index < next) continue;
        entries.insert(entries.end(), step.entries.begin(), step.entries.end());
        next = step.index + 1;
      }
    }
    return entries;
  }

 private:
  std::map<const KvSession*, std::uint64_t> next_;
};

struct Case {
  int group = 1;
  bool capped = false;
  bool like_gpu = false;
};

class LedgerReads
    : public ::testing::TestWithParam<std::tuple<const char*, int, bool, bool, RowFormat>> {
 protected:
  Policy policy_ = parse_policy(std::get<0>(GetParam()));
  Case case_{std::get<1>(GetParam()), std::get<2>(GetParam()), std::get<3>(GetParam())};
  const RowFormat rows_ = std::get<4>(GetParam());
  KvShape shape_{2, case_.group, 1, rows_.fits(16) ? 16 : 32, rows_};

  KvPlan plan(std::optional<std::uint64_t> cap = std::nullopt) const {
    KvRequest request;
    request.shape = shape_;
    request.context = 600;
    request.chunk = 64;
    request.sequences = 3;
    request.decode_batch = 8;
    request.policies = {&policy_, 1};
    request.device_cap = cap;
    request.on.attends_host_rows = true;
    request.has_value_basis = true;
    return plan_kv(request);
  }
  std::optional<std::uint64_t> cap() const {
    if (!case_.capped) return std::nullopt;
    const KvPlan free = plan();
    return free.index_bytes + free.work_bytes + free.table_bytes +
           8 * kPageTokens * shape_.token_bytes();
  }
};

// Rows are all that decoding needs of a prompt; its attention would take the test's time.
void append_prompt(KvSession& session, const Script& script, std::int64_t tokens) {
  while (session.length() < tokens) {
    const std::int64_t at = session.length();
    SoloStep step(session, Phase::prefill, std::min(tokens - at, session.plan().chunk));
    for (int layer = 0; layer < script.shape().layers; ++layer) {
      const auto number = static_cast<std::size_t>(layer);
      step.append(layer, {script.k(number, at), script.v(number, at), script.key_width()});
    }
    step.end();
  }
}

TEST_P(LedgerReads, AreThoseThatHappened) {
  CountingBackend backend(cap().value_or(MemoryAccount::kNoCap));
  // Prime to each other and to the groups, so that no part stands for another.
  if (case_.like_gpu) backend.read_like({kTilePages, 7, 3});
  const auto counter = std::make_shared<TrafficCounter>();
  const auto pool =
      std::make_shared<KvPool>(std::make_unique<CountedQueue>(backend.make_queue(), counter),
                               plan(cap()), std::span<const Policy>(&policy_, 1), own_scorers(),
                               HostAttender(), DiskSource(), testing::value_basis_of(shape_));
  std::vector<Script> scripts;
  std::vector<KvSession> sessions;
  std::vector<KvSession*> all;
  std::vector<const Script*> ordered;
  const std::int64_t lengths[] = {382, 60, 515};
  for (std::uint64_t i = 0; i < 3; ++i) {
    scripts.emplace_back(shape_, 600, 40 + i);
    sessions.emplace_back(pool);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    append_prompt(sessions[i], scripts[i], lengths[i]);
    all.push_back(&sessions[i]);
    ordered.push_back(&scripts[i]);
  }
  Reads before = read_by(backend);
  NewEntries entries;
  entries.take(all);
  counter->start();
  const auto expect_told = [&](const Reads& had, const char* what) {
    EXPECT_EQ(told(all) - had, read_by(backend) - before) << what;
    before = read_by(backend);
  };
  const auto expect_counted = [&](const char* what) {
    const CountedTraffic counted = counter->take();
    EXPECT_GT(counted.moved.size(), 1u) << what;
    EXPECT_EQ(difference(counted, entries.take(all)), "") << what;
  };
  for (int step = 0; step < 3; ++step) {
    const Reads had = told(all);
    step_together(all, ordered);
    expect_told(had, "a batch");
    expect_counted("a batch");
  }
  Reads had = told(all);
  scripts[1].step(sessions[1], Phase::decode, 1);
  expect_told(had, "a step of one");
  expect_counted("a step of one");
  had = told(all);
  scripts[2].step(sessions[2], Phase::decode, 5);
  expect_told(had, "several tokens of one sequence");
  if (policy_.select.name != "dense") {
    EXPECT_GT(read_by(backend).rows, 0u);
    EXPECT_EQ(read_by(backend).index_bytes > 0, policy_.select.name != "streaming");
  }
}

std::string name_of(const ::testing::TestParamInfo<LedgerReads::ParamType>& info) {
  return std::to_string(info.index);
}

INSTANTIATE_TEST_SUITE_P(Policies, LedgerReads,
                         ::testing::Combine(::testing::ValuesIn(kPolicies),
                                            ::testing::Values(1, 4, 16), ::testing::Bool(),
                                            ::testing::Bool(),
                                            ::testing::Values(RowFormat(DType::bf16))),
                         name_of);
INSTANTIATE_TEST_SUITE_P(CodedRows, LedgerReads,
                         ::testing::Combine(::testing::ValuesIn(kPolicies), ::testing::Values(4),
                                            ::testing::Bool(), ::testing::Bool(),
                                            ::testing::Values(RowFormat(RowCode::int8),
                                                              RowFormat(RowCode::k8v4))),
                         name_of);

}  // namespace
}  // namespace sluice
