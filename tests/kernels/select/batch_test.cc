// select() on CUDA for many heads and tokens at once, and what launches of it may depend on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/runtime/owners.h"
#include "sluice/errors.h"
#include "sluice/half.h"
#include "tests/kernels/select/fixture.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

using SelectBatch = Select;

TEST_P(SelectBatch, ManyHeads) {
  Random random(testing::seed(15));
  Case c = case_of(600, 1, 512);
  c.prune = Pruner::top_p;
  c.logits = random.normal(600 * 512, 3.0f);
  for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
  check_case(c);
  c.prune = Pruner::top_k;
  c.k.share.tokens = 17;
  check_case(c);
}

// Bit for bit, where a head's work is divided alike.
TEST_P(SelectBatch, GivesEveryTokenWhatItGetsAlone) {
  if (GetParam() != Path::block && !is_clustered()) GTEST_SKIP() << "divides rows by how many";
  const std::uint64_t seed = testing::seed(23);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (int round = 0; round < 20; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const Case c = random_case(random, random.integer(1, 5000));
    // A single head has the multiprocessor to itself, and more threads add its weights.
    if (GetParam() == Path::block && c.shape.kv_heads == 1) continue;
    const Answer all = run(c);
    for (int token = 0; token < static_cast<int>(std::ssize(c.tokens)); ++token) {
      const Answer own = run(c.alone(token));
      const auto part = [&](const auto& whole, const auto& of_one) {
        const auto first = whole.begin() + token * std::ssize(of_one);
        return std::remove_cvref_t<decltype(whole)>(first, first + std::ssize(of_one));
      };
      EXPECT_EQ(part(all.positions, own.positions), own.positions);
      EXPECT_EQ(part(all.alpha, own.alpha), own.alpha);
    }
    if (HasFailure()) return;
  }
}

// More heads than go at once, of tokens at all sorts of positions.
TEST_P(SelectBatch, ManyTokens) {
  const std::uint64_t seed = testing::seed(24);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  Case c;
  c.shape = shape_of(4, 4);
  c.context = is_clustered() ? 5000 : 2500;
  for (std::int32_t i = 0; i < 64; ++i) {
    const std::int64_t longest = i % 4 == 0 ? c.context : 400;
    c.tokens.push_back({i, static_cast<std::int32_t>(random.integer(0, longest - 1))});
  }
  c.columns = c.capacity = (c.context + 7) / 8 * 8;
  c.sinks = 4;
  c.recent = 20;
  fill_logits(random, c, [](int row) { return row % kKinds; });
  c.k = {{0, 16}, {30, 0}, 24};
  check_case(c);
  c.prune = Pruner::top_p;
  c.p = 0.95f;
  check_case(c);
  c.cap.share.tokens = 40;
  check_case(c);
}

// Candidates are few, wherever they are.
TEST_P(SelectBatch, PositionsReachTheirLimit) {
  Random random(testing::seed(25));
  constexpr std::int64_t kContext = std::int64_t{1} << 31;
  Case c;
  c.shape = shape_of(1, 4);
  c.tokens = {{0, static_cast<std::int32_t>(kContext - 1)}, {1, 300}};
  c.context = kContext;
  for (int head = 0; head < 2; ++head) {
    const std::int64_t end = c.token(head).page_first();
    std::vector<std::int32_t>& list = c.candidates.emplace_back();
    for (std::int64_t at = std::max<std::int64_t>(end - 20000, 0); at < end; at += 3) {
      list.push_back(static_cast<std::int32_t>(at));
    }
  }
  c.columns = c.capacity = 6672 + kPageTokens;
  fill_logits(random, c, [](int) { return 1; });
  c.recent = 1000;
  c.k = {{0, 1 << 21}, {100, 0}, 7};
  check_case(c);
}

// With too little scratch for all heads it takes several rounds.
TEST_P(SelectBatch, TakesTurnsWhereScratchIsShort) {
  if (GetParam() == Path::block || is_clustered()) GTEST_SKIP() << "takes no scratch";
  Random random(testing::seed(21));
  Case c;
  c.shape = shape_of(3, 2);
  c.tokens = {{0, 19999}, {1, 12345}, {2, 200}};
  c.context = c.columns = c.capacity = 20000;
  c.prune = Pruner::top_p;
  c.p = 0.9f;
  c.cap.share.tokens = 300;
  c.logits = random.normal(18 * 20000, 3.0f);
  for (float& x : c.logits) x = f16_to_float(float_to_f16(x));
  Launch less = launch();
  // One head takes about 240 KB.
  for (const std::size_t bytes : {4 << 20, 2 << 20, 1 << 20, 512 << 10}) {
    SCOPED_TRACE(std::to_string(bytes) + " bytes");
    less.scratch_bytes = bytes;
    const Problem problem(c, digested(c));
    select_and_weigh(problem, less);
    require(cudaStreamSynchronize(less.stream), "select");
    for (int head = 0; head < c.heads(); ++head) expect_head(c, problem.answer(), head);
    if (HasFailure()) return;
  }
  less.scratch_bytes = 1000;
  const Problem problem(c, digested(c));
  EXPECT_THROW(select(problem.params(), less), Error);
}

// A recorded call serves other positions, and leaves counters zero.
TEST_P(SelectBatch, IsReplayedFromAGraph) {
  const std::uint64_t seed = testing::seed(16);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  Case c;
  c.shape = shape_of(2, 4);
  c.context = c.columns = c.capacity = 30000;
  c.tokens.assign(3, {0, 29999});
  c.sinks = 4;
  c.recent = 64;
  c.prune = Pruner::top_p;
  c.p = 0.9f;
  c.cap = {{0, 100}, {}, 10};
  fill_logits(random, c, [](int row) { return row % 3; });
  Problem problem(c, digested(c));
  const cudaStream_t stream = launch().stream;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  select_and_weigh(problem, launch());
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph), "capture");
  const GraphOwner graph_owner(graph);
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  const GraphExecOwner executable_owner(executable);
  const std::vector<std::vector<std::int32_t>> positions = {
      {29999, 29998, 29997}, {0, 127, 128}, {255, 9000, 20000}, {29999, 5, 300}};
  for (const auto& step : positions) {
    for (std::size_t i = 0; i < c.tokens.size(); ++i) c.tokens[i].position = step[i];
    problem.renew();
    require(cudaGraphLaunch(executable, stream), "launch");
    require(cudaStreamSynchronize(stream), "select");
    const Answer answer = problem.answer();
    for (int head = 0; head < c.heads(); ++head) {
      SCOPED_TRACE("head " + std::to_string(head) + " at " +
                   std::to_string(c.token(head).position));
      expect_head(c, answer, head);
    }
  }
  std::vector<std::uint32_t> counters(Launch::kCounters);
  require(cudaMemcpy(counters.data(), launch().counters, counters.size() * 4, cudaMemcpyDefault),
          "counters");
  EXPECT_EQ(std::count(counters.begin(), counters.end(), 0u), std::ssize(counters));
}

// The first and the newest tokens of a context without logits, wherever it ends.
TEST(SelectWithoutLogits, PositionsReachTheirLimit) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  constexpr std::int64_t kContext = std::int64_t{1} << 31;
  const Workspace workspace(256);
  Case c;
  c.shape = shape_of(2, 1);
  c.tokens = {{0, static_cast<std::int32_t>(kContext - 1)}, {1, 0}, {2, 1500}};
  c.context = kContext;
  c.capacity = 20000;
  c.sinks = 4;
  c.recent = 17000;
  const Problem problem(c);
  select(problem.params(), workspace.launch());
  require(cudaStreamSynchronize(workspace.launch().stream), "select");
  const Answer a = problem.answer();
  for (int head = 0; head < c.heads(); ++head) {
    const std::int64_t end = c.token(head).page_first();
    std::vector<std::int32_t> expected;
    for (std::int64_t at = 0; at < std::min<std::int64_t>(4, end); ++at) {
      expected.push_back(static_cast<std::int32_t>(at));
    }
    for (std::int64_t at = std::max(end > 0 ? std::int64_t{4} : 0, c.token(head).count() - 17000);
         at < end; ++at) {
      expected.push_back(static_cast<std::int32_t>(at));
    }
    EXPECT_EQ(a.positions[static_cast<std::size_t>(head)], expected);
    EXPECT_EQ(a.alpha[static_cast<std::size_t>(head)], 1.0f);
  }
}

// The backend has 64 MiB of scratch.
TEST(SelectScratch, HoldsOneKvHeadOfTwoMillionTokens) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  constexpr std::int64_t kTokens = std::int64_t{2} << 20;
  const Workspace workspace(std::size_t{64} << 20);
  DeviceLimits limits = workspace.device();
  limits.shared_bytes = 0;  // neither a block nor a cluster holds the logits
  Launch launch = workspace.launch();
  launch.device = &limits;
  const DeviceArray<BatchToken> tokens({{0, static_cast<std::int32_t>(kTokens - 1)}});
  const DeviceArray<std::uint16_t> logits(std::vector<std::uint16_t>(16 * kTokens));
  const DeviceArray<std::int32_t> positions(std::vector<std::int32_t>(kTokens, -7));
  const DeviceArray<HeadSelection> heads({HeadSelection()});
  const DeviceArray<float> alpha(std::vector<float>(16));
  for (const int group : {1, 4, 16}) {
    for (const std::int64_t keep : {256, 65536}) {
      for (const Pruner prune : {Pruner::top_k, Pruner::top_p}) {
        SCOPED_TRACE(std::to_string(group) + ' ' + std::to_string(keep));
        SelectParams p;
        p.shape = {1, group, 1, 128, DType::bf16};
        p.batch = {tokens.data(), 1, kTokens};
        p.logits = {reinterpret_cast<std::byte*>(logits.data()), kTokens};
        p.selected = {positions.data(), kTokens, heads.data()};
        p.alpha = alpha.data();
        p.prune = prune;
        p.k.share.tokens = p.cap.share.tokens = keep;
        p.p = 0.95f;
        select(p, launch);
        require(cudaStreamSynchronize(launch.stream), "select");
        EXPECT_EQ(heads.download(1)[0].count, keep);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, SelectBatch, ::testing::ValuesIn(kPaths), name_of);

}  // namespace
}  // namespace sluice::cuda
