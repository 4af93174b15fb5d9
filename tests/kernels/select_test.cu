// select() on CUDA against what its definition says of the f16 logits in fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "kernels/error.h"
#include "kernels/owners.h"
#include "kernels/select.h"
#include "kernels/workspace.h"
#include "lib/half.h"
#include "sluice/errors.h"
#include "tests/kernels/has_device.h"
#include "tests/kernels/select_cases.h"
#include "tests/kernels/select_truth.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

constexpr std::size_t kScratch = std::size_t{192} << 20;

enum class Path { small, cluster, digested_cluster, large, digested };

class Select : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    workspace_.emplace(kScratch);
    limits_ = workspace_->device();
    // Which path is taken follows from these alone.
    if (GetParam() == Path::large || GetParam() == Path::digested) limits_.shared_bytes = 0;
    if (GetParam() == Path::small) limits_.multiprocessors = 1;
    if (is_clustered()) limits_.multiprocessors = 1 << 20;
    // Nothing may be taken for granted of scratch.
    require(cudaMemset(launch().scratch, 0xa5, kScratch), "memset");
  }
  static bool is_clustered() {
    return GetParam() == Path::cluster || GetParam() == Path::digested_cluster;
  }
  static bool digested(const Case& c) {
    const bool is = GetParam() == Path::digested || GetParam() == Path::digested_cluster;
    return is && c.candidates.empty();
  }
  Launch launch() const {
    Launch launch = workspace_->launch();
    launch.device = &limits_;
    return launch;
  }
  Answer run(const Case& c) const {
    const Problem problem(c, digested(c));
    EXPECT_LE(select_scratch_bytes(problem.params(), limits_), kScratch);
    select(problem.params(), launch());
    require(cudaStreamSynchronize(launch().stream), "select");
    return problem.answer();
  }
  void check_case(const Case& c) const {
    const Answer a = run(c);
    const Answer b = run(c);
    EXPECT_EQ(a.positions, b.positions);
    EXPECT_EQ(a.alpha, b.alpha);
    for (int head = 0; head < c.kv_heads; ++head) {
      SCOPED_TRACE("KV head " + std::to_string(head));
      expect_head(c, a, head);
      if (HasFailure()) return;
    }
  }

  std::optional<Workspace> workspace_;
  DeviceLimits limits_;
};

TEST_P(Select, KeepsWhatItsDefinitionSays) {
  const std::uint64_t seed = testing::seed(11);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  // What is short takes the small path wherever it may.
  const std::int64_t factor = is_clustered() ? 5 : 1;
  for (int round = 0; round < 300; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const auto most = std::to_array<std::int64_t>({40, 400, 5000, 9000});
    const std::int64_t count = random.integer(1, most[static_cast<std::size_t>(round % 4)]);
    check_case(random_case(random, factor * count));
    if (HasFailure()) return;
  }
}

TEST_P(Select, LongRows) {
  const std::uint64_t seed = testing::seed(12);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 16; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    // The longest may not fit a block.
    const bool is_small = GetParam() == Path::small;
    const Case c =
        random_case(random, random.integer(is_small ? 10000 : 20000, is_small ? 30000 : 200000));
    check_case(c);
    if (HasFailure()) return;
  }
}

TEST_P(Select, AMillionLogits) {
  if (GetParam() == Path::small || GetParam() == Path::cluster) GTEST_SKIP() << "does not fit";
  Random random(testing::seed(13));
  for (const int kind : {2, 4, 5, 7, 9}) {
    SCOPED_TRACE("kind " + std::to_string(kind));
    Case c;
    c.group = 2;
    c.count = c.stride = c.capacity = 1 << 20;
    c.end = c.count;
    c.prune = Pruner::top_p;
    c.p = 0.95f;
    for (int row = 0; row < 2; ++row) {
      const std::vector<float> logits = row_of(random, c.count, kind);
      c.logits.insert(c.logits.end(), logits.begin(), logits.end());
    }
    check_case(c);
    c.cap = 256;
    check_case(c);
    c.prune = Pruner::top_k;
    c.k = 4096;
    check_case(c);
  }
}

// Where a cluster has a digest alone, it reads what may be kept, or all of it.
TEST_P(Select, FewOfMany) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested) GTEST_SKIP();
  const std::uint64_t seed = testing::seed(22);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    const std::int64_t most = round == 20 ? 1600000 : round % 4 == 3 ? 500000 : 90000;
    Case c = few_of_many(random, random.integer(round == 20 ? 1400000 : most / 4, most));
    SCOPED_TRACE("round " + std::to_string(round) + ", " + std::to_string(c.count) + " logits, " +
                 std::to_string(c.group) + " query heads");
    check_case(c);
    c.prune = c.prune == Pruner::top_k ? Pruner::top_p : Pruner::top_k;
    check_case(c);
    if (HasFailure()) return;
  }
}

// More neighbours are wanted than a block of a cluster lists, but no more than may be kept.
TEST_P(Select, ManyNeighboursOfMany) {
  if (GetParam() != Path::digested_cluster && GetParam() != Path::digested) GTEST_SKIP();
  for (const std::int64_t heavy : {2040, 2056, 3000, 4090, 4200}) {
    SCOPED_TRACE(std::to_string(heavy) + " heavy neighbours");
    Case c;
    c.count = c.end = c.stride = c.capacity = 262144;
    c.k = c.cap = 4096;
    for (std::int64_t i = 0; i < c.count; ++i) {
      c.logits.push_back(i >= 1000 && i < 1000 + heavy ? 8.0f : -10.0f);
    }
    check_case(c);
    c.prune = Pruner::top_p;
    c.p = 0.9f;
    check_case(c);
  }
}

TEST_P(Select, SettlesTiesOfSumsToTheOlder) {
  Case c;
  c.group = 4;
  c.count = c.stride = c.capacity = 3000;
  c.end = c.count;
  c.k = 100;
  for (int i = 0; i < 4 * 3000; ++i) c.logits.push_back(i % 3000 % 7 == 0 ? 1.0f : 0.0f);
  const Answer a = run(c);
  ASSERT_EQ(a.heads[0].count, 100);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(a.positions[0][static_cast<std::size_t>(i)], 7 * i);
}

// More candidates weigh the same than are gathered, or just about as many as are kept.
TEST_P(Select, ManyThatWeighTheSame) {
  for (const int group : {1, 8}) {
    for (const std::int64_t heavy : {0, 90, 100, 110, 3000, 40000}) {
      SCOPED_TRACE(std::to_string(group) + " query heads, " + std::to_string(heavy) + " heavier");
      Case c;
      c.group = group;
      c.count = c.stride = c.capacity = GetParam() == Path::small ? 6000 : 48000;
      c.end = c.count;
      c.sinks = 3;
      c.k = c.cap = 100;
      for (std::int64_t i = 0; i < group * c.stride; ++i) {
        c.logits.push_back(i % c.stride * 7919 % c.count < heavy ? 2.5f : -1.0f);
      }
      check_case(c);
      c.prune = Pruner::top_p;
      for (const float p : {0.3f, 0.9f, 1.0f}) {
        c.p = p;
        check_case(c);
      }
    }
  }
}

// Single heavy entries stand out of what weighs more together.
TEST_P(Select, ManyLightBesideFewHeavy) {
  for (const int group : {1, 3, 6}) {
    SCOPED_TRACE(std::to_string(group) + " query heads");
    Case c;
    c.group = group;
    c.count = c.end = c.stride = c.capacity = GetParam() == Path::small ? 6000 : 40000;
    c.prune = Pruner::top_p;
    for (std::int64_t i = 0; i < group * c.stride; ++i) {
      const std::int64_t at = i % c.stride + i / c.stride * 32;
      c.logits.push_back(at / 16 % 2 == 0 ? (at % 16 == 5 ? 0.0f : -12.0f) : -4.0f);
    }
    for (const float p : {0.7f, 0.9f, 0.95f}) {
      c.p = p;
      check_case(c);
    }
  }
}

TEST_P(Select, CapsAboutWhatIsWanted) {
  const std::uint64_t seed = testing::seed(17);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 40; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const std::int64_t most = round % 8 == 7 && GetParam() != Path::small ? 90000 : 9000;
    Case c = random_case(random, random.integer(most / 2, most));
    c.prune = Pruner::top_p;
    c.cap = kNoLimit;
    const std::vector<HeadSelection> heads = run(c).heads;
    const std::int64_t wanted = heads[0].count;
    for (const std::int64_t cap : {wanted / 2, wanted - 1, wanted, wanted + 1}) {
      SCOPED_TRACE("cap " + std::to_string(cap));
      c.cap = std::max<std::int64_t>(cap, 1);
      check_case(c);
      if (HasFailure()) return;
    }
  }
}

// What is heaviest may not be selected, in sectors alone and with others.
TEST_P(Select, LeavesOutTheHeaviest) {
  Random random(testing::seed(18));
  for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
    Case c;
    c.group = 4;
    c.count = c.end = c.stride = c.capacity = 8000;
    c.prune = prune;
    c.k = c.cap = 50;
    c.logits = random.normal(4 * 8000, 3.0f);
    c.eligible.assign(8000, 1);
    for (std::int64_t i = 0; i < 4 * c.stride; ++i) {
      const std::int64_t at = i % c.stride;
      float& x = c.logits[static_cast<std::size_t>(i)];
      const bool is_out = at % 1000 < 100 || at % 97 == 0;
      if (is_out) c.eligible[static_cast<std::size_t>(at)] = 0;
      x = f16_to_float(float_to_f16(is_out ? x + 20.0f : x));
    }
    check_case(c);
    c.cap = kNoLimit;
    check_case(c);
  }
}

TEST_P(Select, KeepsWhatItMustBeyondItsLimit) {
  Random random(testing::seed(19));
  for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
    Case c;
    c.kv_heads = 2;
    c.group = 4;
    c.count = c.stride = c.capacity = 7001;
    c.end = 6912;
    c.prune = prune;
    c.sinks = 20;
    c.recent_first = 6700;
    c.logits = random.normal(8 * 7001, 3.0f);
    for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
    for (const std::int64_t keep : {1, 231, 232, 233, 300}) {
      c.k = c.cap = keep;
      check_case(c);
      const Answer a = run(c);
      EXPECT_EQ(a.heads[0].count, std::max<std::int64_t>(keep, 232));
    }
  }
}

TEST_P(Select, ReportsWhatIsNoNumber) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float strange : {std::nanf(""), kInfinity}) {
    for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
      Case c;
      c.kv_heads = 3;
      c.group = 2;
      c.count = c.end = c.stride = c.capacity = 9000;
      c.prune = prune;
      c.k = 10;
      c.logits.assign(6 * 9000, 0.5f);
      c.logits[3 * 9000 + 4321] = strange;
      std::fill_n(c.logits.begin() + 4 * 9000, 9000, -kInfinity);
      check_case(c);
      const Answer a = run(c);
      EXPECT_EQ(a.heads[0].bad, 0);
      EXPECT_EQ(a.heads[1].bad, 1);
      EXPECT_EQ(a.heads[2].bad, 1);
    }
  }
}

TEST_P(Select, NeverWritesPastItsCapacity) {
  Random random(testing::seed(14));
  for (const std::int64_t capacity : {1, 100, 4096, 5000}) {
    Case c;
    c.kv_heads = 2;
    c.group = 2;
    c.count = c.end = c.stride = 9000;
    c.prune = Pruner::top_p;
    c.p = 1.0f;
    c.logits = random.normal(4 * 9000, 2.0f);
    for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
    c.capacity = capacity;
    const Answer a = run(c);
    for (int head = 0; head < 2; ++head) {
      const auto h = static_cast<std::size_t>(head);
      EXPECT_EQ(a.heads[h].count, capacity);
      EXPECT_EQ(a.heads[h].cut, 1);
      ASSERT_EQ(std::ssize(a.positions[h]), capacity);
      for (std::int64_t i = 0; i < capacity; ++i) {
        EXPECT_EQ(a.positions[h][static_cast<std::size_t>(i)], i);
      }
      expect_head(c, a, head);
    }
  }
}

TEST_P(Select, ManyHeads) {
  Random random(testing::seed(15));
  Case c;
  c.kv_heads = 600;
  c.count = c.end = c.stride = c.capacity = 500;
  c.prune = Pruner::top_p;
  c.logits = random.normal(600 * 500, 3.0f);
  for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
  check_case(c);
  c.prune = Pruner::top_k;
  c.k = 17;
  check_case(c);
}

// Blocks have spans of several strips per warp, some of which keep all and some hardly anything.
TEST_P(Select, FewHereAndManyThere) {
  if (GetParam() == Path::small || GetParam() == Path::cluster) GTEST_SKIP() << "does not fit";
  const std::uint64_t seed = testing::seed(22);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  // So few that one strip per warp would not do.
  limits_.multiprocessors = 8;
  for (const int group : {1, 3, 4}) {
    SCOPED_TRACE(std::to_string(group) + " query heads");
    Case c;
    c.kv_heads = 3;
    c.group = group;
    c.count = 150001;
    c.stride = 150016;
    c.capacity = c.end = 149900;
    c.sinks = 5;
    c.recent_first = 149000;
    c.prune = Pruner::top_p;
    c.logits = random.normal(3 * group * c.stride, 3.0f);
    for (std::int64_t i = 0; i < 3 * group * c.stride; ++i) {
      float& x = c.logits[static_cast<std::size_t>(i)];
      const std::int64_t at = i % c.stride;
      x = f16_to_float(float_to_f16(at >= 40000 && at < 50000 ? x + 4.0f : x));
    }
    for (const float p : {0.5f, 0.95f, 0.999f}) {
      c.p = p;
      check_case(c);
      if (HasFailure()) return;
    }
  }
}

// With too little scratch for all heads it takes several rounds.
TEST_P(Select, TakesTurnsWhereScratchIsShort) {
  if (GetParam() == Path::small || is_clustered()) GTEST_SKIP() << "takes no scratch";
  Random random(testing::seed(21));
  Case c;
  c.kv_heads = 7;
  c.group = 2;
  c.count = c.end = c.stride = c.capacity = 20000;
  c.prune = Pruner::top_p;
  c.p = 0.9f;
  c.cap = 300;
  c.logits = random.normal(14 * 20000, 3.0f);
  for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
  const Problem problem(c, digested(c));
  Launch less = launch();
  less.scratch_bytes = select_scratch_bytes(problem.params(), limits_) * 2 / 5;
  select(problem.params(), less);
  require(cudaStreamSynchronize(less.stream), "select");
  for (int head = 0; head < c.kv_heads; ++head) expect_head(c, problem.answer(), head);
  less.scratch_bytes = 1000;
  EXPECT_THROW(select(problem.params(), less), Error);
}

TEST_P(Select, RunsInAGraphAndLeavesCountersZero) {
  Random random(testing::seed(16));
  Case c = random_case(random, 30000);
  const Problem problem(c, digested(c));
  const cudaStream_t stream = launch().stream;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  select(problem.params(), launch());
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph), "capture");
  const GraphOwner graph_owner(graph);
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  const GraphExecOwner executable_owner(executable);
  for (int i = 0; i < 3; ++i) require(cudaGraphLaunch(executable, stream), "launch");
  require(cudaStreamSynchronize(stream), "select");
  for (int head = 0; head < c.kv_heads; ++head) expect_head(c, problem.answer(), head);
  std::vector<std::uint32_t> counters(Launch::kCounters);
  require(cudaMemcpy(counters.data(), launch().counters, counters.size() * 4, cudaMemcpyDefault),
          "counters");
  EXPECT_EQ(std::count(counters.begin(), counters.end(), 0u), std::ssize(counters));
}

// The backend has 64 MiB.
TEST(SelectScratch, HoldsOneKvHeadOfTwoMillionTokens) {
  const DeviceLimits limits = {132, 232448, 90};
  for (const int group : {1, 4, 16}) {
    for (const std::int64_t keep : {256, 65536}) {
      for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
        SelectParams p;
        p.shape = {1, group, 1, 128, DType::bf16};
        p.count = p.end = p.logits.stride = p.selected.capacity = std::int64_t{2} << 20;
        p.recent_first = p.count;
        p.prune = prune;
        p.k = p.cap = keep;
        p.p = 0.95f;
        EXPECT_LE(select_scratch_bytes(p, limits), std::size_t{64} << 20)
            << group << ' ' << keep << ' ' << static_cast<int>(prune);
      }
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Path>& path) {
  switch (path.param) {
    case Path::small:
      return "small";
    case Path::cluster:
      return "cluster";
    case Path::digested_cluster:
      return "digested_cluster";
    case Path::large:
      return "large";
    case Path::digested:
      break;
  }
  return "digested";
}

INSTANTIATE_TEST_SUITE_P(Paths, Select,
                         ::testing::Values(Path::small, Path::cluster, Path::digested_cluster,
                                           Path::large, Path::digested),
                         name_of);

}  // namespace
}  // namespace sluice::cuda
