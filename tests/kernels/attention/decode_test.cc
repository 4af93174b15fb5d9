// Attention of decoded tokens by itself: launches that are replayed, and devices with less memory.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/cuda_backend.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/attention_parity.h"
#include "tests/support/paged_cases.h"

namespace sluice::cuda {
namespace {

using testing::AttentionCase;
using testing::newest_case;
using testing::Partial;

constexpr KvShape kShape{1, 8, 2, 128, DType::bf16};
constexpr testing::Rounding kRounding{testing::kBf16Step * testing::kBf16Step,
                                      testing::kBf16Step* testing::kBf16Step};

class DecodeAttention : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    backend_ = std::make_unique<testing::Device>(make_cuda_backend({}));
    workspace_ = std::make_unique<Workspace>(std::size_t{64} << 20);
    limits_ = workspace_->device();
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
TEST_F(DecodeAttention, AReplayFollowsThePositions) {
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 3; ++i) cases.push_back(newest_case(random_, kShape, 3000));
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
TEST_F(DecodeAttention, AReplayFollowsTheGaps) {
  for (const std::size_t count : {1, 3}) {
    std::vector<AttentionCase> cases;
    for (std::size_t i = 0; i < count; ++i) cases.push_back(newest_case(random_, kShape, 3000));
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

// What a device with 99 KiB can have for each block is enough for the largest batch.
TEST_F(DecodeAttention, TheLargestBatchFitsIntoLittleMemory) {
  constexpr KvShape kMany{1, 64, 64, 128, DType::bf16};
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 64; ++i) {
    cases.push_back(newest_case(random_, kMany, random_.integer(1, 140)));
  }
  const Batch batch(*backend_, random_, cases, 4096);
  run([&] { attend_decode(batch.params, launch()); });
  const std::vector<Partial> expected = batch.queries.results();
  expect_parity(cases, expected);
  if (HasFatalFailure()) return;
  limits_.shared_bytes = 99 << 10;
  run([&] { attend_decode(batch.params, launch()); });
  const std::vector<Partial> actual = batch.queries.results();
  for (std::size_t i = 0; i < cases.size(); ++i) {
    ASSERT_EQ(actual[i].out, expected[i].out) << i;
    ASSERT_EQ(actual[i].lse, expected[i].lse) << i;
  }
}

// What does not fit into one launch takes several.
TEST_F(DecodeAttention, LittleScratchTakesSeveralLaunches) {
  std::vector<AttentionCase> cases;
  for (int i = 0; i < 11; ++i) {
    cases.push_back(newest_case(random_, kShape, random_.integer(1, 1500)));
  }
  const Batch batch(*backend_, random_, cases, 4096);
  // Of three tokens, at most.
  Launch little = launch();
  little.scratch_bytes = static_cast<std::size_t>(limits_.multiprocessors + 3 * kShape.kv_heads) *
                         (8 * (128 + 2) + 1) * sizeof(float);
  run([&] { attend_decode(batch.params, little); });
  expect_parity(cases, batch.queries.results());
}

TEST_F(DecodeAttention, LeavesCountersZero) {
  const std::vector<AttentionCase> cases = {newest_case(random_, kShape, 5000),
                                            newest_case(random_, kShape, 70)};
  const Batch batch(*backend_, random_, cases, 8192);
  run([&] { attend_decode(batch.params, launch()); });
  std::vector<std::uint32_t> counters(Launch::kCounters, 1);
  require(cudaMemcpy(counters.data(), launch().counters, counters.size() * sizeof(std::uint32_t),
                     cudaMemcpyDeviceToHost),
          "counters");
  EXPECT_EQ(counters, std::vector<std::uint32_t>(Launch::kCounters));
}

}  // namespace
}  // namespace sluice::cuda
