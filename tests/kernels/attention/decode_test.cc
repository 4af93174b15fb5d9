// Attention of decoded tokens by itself: launches that are replayed, and devices with less memory.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <ostream>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/cuda_backend.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "lib/gpu_sizes.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/attention_parity.h"
#include "tests/support/paged_cases.h"

namespace sluice::cuda {
namespace {

using testing::AttentionCase;
using testing::newest_case;
using testing::Partial;

constexpr testing::Rounding kRounding{testing::kBf16Step * testing::kBf16Step,
                                      testing::kBf16Step* testing::kBf16Step};

// Rows of one format, and how much shared memory a block may have; where it is little, tiles of
// wide rows are smaller.
struct Case {
  int head_dim = 0;
  RowFormat rows;
  bool has_little = false;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "head_dim " << c.head_dim << " in " << to_string(c.rows)
             << (c.has_little ? " with little shared memory" : "");
}

class DecodeAttention : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    backend_ = std::make_unique<testing::Device>(make_cuda_backend({}));
    workspace_ = std::make_unique<Workspace>(std::size_t{64} << 20);
    limits_ = workspace_->device();
    if (GetParam().has_little) limits_.shared_bytes = gpu::kLeastSharedBytes;
  }

  KvShape shape(int query_heads = 8, int kv_heads = 2) const {
    return {1, query_heads, kv_heads, GetParam().head_dim, GetParam().rows};
  }

  Launch launch() const {
    Launch launch = workspace_->launch();
    launch.device = &limits_;
    return launch;
  }
  // Runs work on the workspace's stream, between what the backend's does.
  void run(const std::function<void()>& work) const {
    backend_->synchronize();
    work();
    require(cudaStreamSynchronize(workspace_->launch().stream), "decode attention");
  }

  const std::uint64_t seed_ = testing::seed(77);
  testing::Random random_{seed_};
  std::unique_ptr<testing::Device> backend_;
  std::unique_ptr<Workspace> workspace_;
  DeviceLimits limits_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// Cases in device memory, with room for positions up to `capacity`.
struct Batch {
  Batch(testing::Device& backend, testing::Random& random, const std::vector<AttentionCase>& cases,
        std::int64_t capacity)
      : sequences(backend, random, cases, testing::Places::either), queries(backend, cases) {
    queries.put(params);
    params.batch = sequences.batch(capacity);
    params.rows = sequences.rows();
    params.scale = cases.front().scale;
  }

  testing::PagedSequences sequences;
  testing::BatchQueries queries;
  AttendBatchParams params;
};

void expect_parity(const std::vector<AttentionCase>& cases, const std::vector<Partial>& results) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(::testing::Message() << "sequence " << i);
    testing::expect_parity(cases[i], results[i], kRounding);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

GraphExecOwner recorded(const AttendBatchParams& params, const Launch& launch) {
  require(cudaStreamBeginCapture(launch.stream, cudaStreamCaptureModeThreadLocal), "capturing");
  attend_decode(params, launch);
  cudaGraph_t captured = nullptr;
  require(cudaStreamEndCapture(launch.stream, &captured), "capturing");
  const GraphOwner graph(captured);
  cudaGraphExec_t instance = nullptr;
  require(cudaGraphInstantiate(&instance, captured, 0), "a graph");
  return GraphExecOwner(instance);
}

// A recorded launch serves whatever positions are in memory when it is replayed.
TEST_P(DecodeAttention, AReplayFollowsThePositions) {
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 3; ++i) cases.push_back(newest_case(random_, shape(), 3000));
  const Batch batch(*backend_, random_, cases, 1 << 20);
  const cudaStream_t stream = workspace_->launch().stream;
  run([&] { attend_decode(batch.params, launch()); });
  const GraphExecOwner exec = recorded(batch.params, launch());
  std::vector<BatchToken> tokens = batch.sequences.tokens();
  for (const std::vector<std::int32_t>& positions : {std::vector<std::int32_t>{0, 0, 0},
                                                     {127, 128, 2999},
                                                     {2999, 1, 1000},
                                                     {5, 6, 7},
                                                     {2048, 2048, 2048}}) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      tokens[i].position = positions[i];
      cases[i].first_query_position = positions[i];
    }
    copy_in(const_cast<BatchToken*>(batch.params.batch.tokens), tokens.data(),
            tokens.size() * sizeof(BatchToken));
    run([&] { require(cudaGraphLaunch(exec.get(), stream), "a replay"); });
    expect_parity(cases, batch.queries.results());
    if (HasFatalFailure()) return;
  }
}

// It follows the gaps, too, of one token or of several.
TEST_P(DecodeAttention, AReplayFollowsTheGaps) {
  for (const std::size_t count : {1, 3}) {
    std::vector<AttentionCase> cases;
    for (std::size_t i = 0; i < count; ++i) cases.push_back(newest_case(random_, shape(), 3000));
    Batch batch(*backend_, random_, cases, 1 << 20);
    const Buffer gaps = testing::upload(*backend_, std::vector<PositionGap>(count));
    batch.params.gaps = reinterpret_cast<const PositionGap*>(gaps.data());
    const cudaStream_t stream = workspace_->launch().stream;
    run([&] { attend_decode(batch.params, launch()); });
    const GraphExecOwner exec = recorded(batch.params, launch());
    for (const std::vector<PositionGap>& now : {std::vector<PositionGap>{{0, 0}, {0, 0}, {0, 0}},
                                                {{0, 2944}, {128, 256}, {0, 0}},
                                                {{1280, 2944}, {0, 1664}, {256, 1920}},
                                                {{128, 2816}, {2816, 2944}, {0, 2944}}}) {
      const std::vector<PositionGap> own(now.begin(),
                                         now.begin() + static_cast<std::ptrdiff_t>(count));
      copy_in(gaps.data(), own.data(), own.size() * sizeof(PositionGap));
      run([&] { require(cudaGraphLaunch(exec.get(), stream), "a replay"); });
      std::vector<AttentionCase> left;
      for (std::size_t i = 0; i < count; ++i) left.push_back(testing::around(cases[i], own[i]));
      expect_parity(left, batch.queries.results());
      if (HasFatalFailure()) return;
    }
  }
}

// Shared memory is enough for the largest batch, in several launches if need be.
TEST_P(DecodeAttention, TheLargestBatchFitsIntoLittleMemory) {
  const std::int64_t most = 140 * 128 / GetParam().head_dim;
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 64; ++i) {
    cases.push_back(newest_case(random_, shape(64, 64), random_.integer(1, most)));
  }
  const Batch batch(*backend_, random_, cases, 4096);
  run([&] { attend_decode(batch.params, launch()); });
  expect_parity(cases, batch.queries.results());
}

class DecodeStages : public DecodeAttention {};

// Fewer stages give the same bits. Smaller tiles do not: they divide rows in another way.
TEST_P(DecodeStages, DoNotChangeResults) {
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 5; ++i) {
    cases.push_back(newest_case(random_, shape(), random_.integer(1, 2000)));
  }
  const Batch batch(*backend_, random_, cases, 4096);
  run([&] { attend_decode(batch.params, launch()); });
  const std::vector<Partial> expected = batch.queries.results();
  const int of_two = shape().row_bytes() > 512 ? 163 << 10 : gpu::kLeastSharedBytes;
  limits_.shared_bytes = std::min(limits_.shared_bytes, of_two);
  run([&] { attend_decode(batch.params, launch()); });
  const std::vector<Partial> actual = batch.queries.results();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    ASSERT_EQ(actual[i].out, expected[i].out) << i;
    ASSERT_EQ(actual[i].lse, expected[i].lse) << i;
  }
}

// What does not fit into one launch takes several.
TEST_P(DecodeAttention, LittleScratchTakesSeveralLaunches) {
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 11; ++i) {
    cases.push_back(newest_case(random_, shape(), random_.integer(1, 1500)));
  }
  const Batch batch(*backend_, random_, cases, 4096);
  // Of three tokens, at most.
  Launch little = launch();
  const KvShape own = shape();
  little.scratch_bytes = static_cast<std::size_t>((limits_.multiprocessors + 3 * own.kv_heads) *
                                                  (8 * (own.head_dim + 2) + 1)) *
                         sizeof(float);
  run([&] { attend_decode(batch.params, little); });
  expect_parity(cases, batch.queries.results());
}

TEST_P(DecodeAttention, LeavesCountersZero) {
  const std::vector<AttentionCase> cases = {newest_case(random_, shape(), 5000),
                                            newest_case(random_, shape(), 70)};
  const Batch batch(*backend_, random_, cases, 8192);
  run([&] { attend_decode(batch.params, launch()); });
  std::vector<std::uint32_t> counters(Launch::kCounters, 1);
  require(cudaMemcpy(counters.data(), launch().counters, counters.size() * sizeof(std::uint32_t),
                     cudaMemcpyDeviceToHost),
          "counters");
  EXPECT_EQ(counters, std::vector<std::uint32_t>(Launch::kCounters));
}

INSTANTIATE_TEST_SUITE_P(
    OfAnyDevice, DecodeAttention,
    ::testing::Values(Case{128, DType::bf16, false}, Case{128, DType::bf16, true},
                      Case{256, DType::bf16, false}, Case{256, DType::bf16, true},
                      Case{256, DType::f16, true}, Case{256, RowCode::int8, true},
                      Case{128, RowCode::k8v4, false}, Case{256, RowCode::k8v4, true}));
INSTANTIATE_TEST_SUITE_P(OfAnyDevice, DecodeStages,
                         ::testing::Values(Case{128, DType::bf16}, Case{256, DType::bf16}));

}  // namespace
}  // namespace sluice::cuda
