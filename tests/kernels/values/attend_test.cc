// Attention over value tiles on the device, by its definition.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "kernels/values/values.h"
#include "lib/gpu_sizes.h"
#include "sluice/errors.h"
#include "tests/kernels/has_device.h"
#include "tests/kernels/values/device_problem.h"
#include "tests/support/partial_cases.h"
#include "tests/support/value_cases.h"

namespace sluice::cuda {
namespace {

using testing::ValueAnswer;
using testing::ValueCase;
using testing::ValueProblem;

constexpr std::size_t kScratch = std::size_t{32} << 20;
// Weights are f16 where they meet codes, relative to the heaviest of their page.
constexpr double kWeightError = 0x1p-11;

void expect_equal(const ValueCase& c, const DeviceProblem& device, const ValueAnswer& wanted) {
  testing::ValueTolerance tolerance = testing::tolerance_of(c, kWeightError);
  tolerance.lse = 1e-4;
  testing::expect_answer(wanted, device.out(), device.lse(), device.pages_read(), tolerance);
}

// `shared`: bytes that a block may have, 0: as many as on this device.
void check_case(const ValueCase& c, std::uint64_t seed, bool with_digest,
                std::size_t scratch = kScratch, int shared = 0) {
  SCOPED_TRACE(testing::seed_message(seed) + " " + c.name() +
               (with_digest ? " digested" : " without a digest"));
  ValueProblem problem(c, seed);
  const Workspace workspace(scratch);
  DeviceLimits limits = workspace.device();
  if (shared > 0) limits.shared_bytes = shared;
  Launch launch = workspace.launch();
  launch.device = &limits;
  require(cudaMemset(launch.scratch, 0xff, scratch), "memset");
  const DeviceProblem device(problem, with_digest);
  const ValueAnswer wanted = testing::answer_of(problem);
  std::vector<float> first;
  // Twice: nothing may be left behind, and nothing depend on timing.
  for (int turn = 0; turn < 2; ++turn) {
    device.reset();
    attend_tiles(device.params(), launch);
    require(cudaStreamSynchronize(launch.stream), "attend_tiles");
    expect_equal(c, device, wanted);
    if (turn == 0) first = device.out();
  }
  EXPECT_EQ(first, device.out());
}

TEST(CudaAttendTiles, LikeTheDefinition) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1);
  for (const ValueCase& c : testing::value_cases()) check_case(c, ++seed, false);
}

TEST(CudaAttendTiles, LikeTheDefinitionWithDigest) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(1);
  for (const ValueCase& c : testing::value_cases()) check_case(c, ++seed, true);
}

TEST(CudaAttendTiles, OfLongContexts) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(200);
  for (const bool with_digest : {false, true}) {
    for (const float share : {0.9f, 1.0f}) {
      check_case({64, 2, 2, share, {(1 << 20) - 1}, 32, 1}, ++seed, with_digest);
    }
    check_case({128, 4, 2, 0.9f, {131071, 77, 65536}, 256, 2, true}, ++seed, with_digest);
  }
}

// More pages than a block lists at a time, of a head with several blocks and of heads with one, in
// little shared memory.
TEST(CudaAttendTiles, ListsInRounds) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  constexpr int kLittle = 26 << 10;
  std::uint64_t seed = testing::seed(250);
  const DeviceLimits device = Workspace(256).device();
  std::vector<std::int32_t> many(2 * static_cast<std::size_t>(device.multiprocessors) + 1, 300);
  many[7] = 110000;
  for (const bool with_digest : {false, true}) {
    for (const float share : {0.9f, 1.0f}) {
      check_case({64, 17, 2, share, {(1 << 20) - 1}, 32, 1}, ++seed, with_digest, kScratch,
                 kLittle);
    }
    check_case({32, 1, 1, 0.9f, many, 32, 1, true}, ++seed, with_digest, kScratch, kLittle);
  }
}

// Pages of the widest rows, where a block has 99 KiB.
TEST(CudaAttendTiles, OfWideRowsInLittleMemory) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(270);
  for (const int bits : {1, 2, 3, 4}) {
    for (const bool with_digest : {false, true}) {
      ValueCase c{256, 8, bits, 0.9f, {5, 700, 20000}, 16, 2, true};
      check_case(c, ++seed, with_digest, kScratch, gpu::kLeastSharedBytes);
      c.half = true;
      check_case(c, ++seed, with_digest, kScratch, gpu::kLeastSharedBytes);
    }
  }
}

// A few tokens at a time where there is little scratch.
TEST(CudaAttendTiles, OfLargeBatches) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  ValueCase c{64, 4, 2, 0.9f, {}, 16, 2, true};
  for (std::int32_t i = 0; i < 24; ++i) c.positions.push_back(37 + i * 113);
  for (const bool with_digest : {false, true}) {
    c.half = true;
    check_case(c, testing::seed(300), with_digest);
    c.half = false;
    check_case(c, testing::seed(300), with_digest);
    ValueProblem problem(c, 1);
    AttendTilesParams one = problem.params();
    one.batch.count = 1;
    const Workspace any(256);
    check_case(c, testing::seed(300), with_digest,
               2 * attend_tiles_scratch_bytes(one, any.device()));
  }
}

TEST(CudaAttendTiles, LeavesOutHeadsWhoseSelectionIsBad) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  for (const bool merge : {false, true}) {
    ValueCase c;
    c.merge = merge;
    ValueProblem problem(c, testing::seed(3));
    const ValueAnswer wanted = testing::spoil_head(problem, 7);
    const Workspace workspace(kScratch);
    const DeviceProblem device(problem, false);
    attend_tiles(device.params(), workspace.launch());
    require(cudaStreamSynchronize(workspace.launch().stream), "attend_tiles");
    expect_equal(c, device, wanted);
  }
}

// From a graph, with tokens that move on between launches.
TEST(CudaAttendTiles, RunsFromGraphs) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  const std::uint64_t seed = testing::seed(4);
  const ValueCase c;
  ValueProblem problem(c, seed);
  const Workspace workspace(kScratch);
  const cudaStream_t stream = workspace.launch().stream;
  const DeviceProblem device(problem, true);
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  attend_tiles(device.params(), workspace.launch());
  cudaGraph_t graph = nullptr;
  require(cudaStreamEndCapture(stream, &graph), "capture");
  const GraphOwner graph_owner(graph);
  cudaGraphExec_t executable = nullptr;
  require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
  const GraphExecOwner executable_owner(executable);
  for (const std::int32_t back : {0, 300}) {
    // Fewer pages of the longest, whose selection stays.
    problem.tokens.back().position = c.positions.back() - back;
    if (back > 0) {
      for (HeadSelection& head : problem.heads) head.count = 0;
    }
    auto* const tokens = const_cast<BatchToken*>(device.params().batch.tokens);
    copy_in(tokens, problem.tokens.data(), problem.tokens.size() * sizeof(BatchToken));
    std::memcpy(device.params().selected.heads, problem.heads.data(),
                problem.heads.size() * sizeof(HeadSelection));
    device.reset();
    require(cudaGraphLaunch(executable, stream), "launch");
    require(cudaStreamSynchronize(stream), "attend_tiles");
    SCOPED_TRACE(testing::seed_message(seed));
    expect_equal(c, device, testing::answer_of(problem));
  }
}

TEST(CudaAttendTiles, RefusesTooLittleScratch) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  ValueProblem problem(ValueCase{}, 1);
  const Workspace workspace(1024);
  const DeviceProblem device(problem, false);
  EXPECT_THROW(attend_tiles(device.params(), workspace.launch()), Error);
}

TEST(CudaMergePartials, OfAnySize) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  const std::uint64_t seed = testing::seed(5);
  SCOPED_TRACE(testing::seed_message(seed));
  const testing::PartialsCase c(80, seed);
  const DeviceBlock from = upload(c.from);
  const DeviceBlock from_lse = upload(c.from_lse);
  const DeviceBlock out = upload(c.old);
  const DeviceBlock lse = upload(c.old_lse);
  const Workspace workspace(256);
  merge_partials({c.rows(), c.head_dim, static_cast<const float*>(from.get()),
                  static_cast<const float*>(from_lse.get()), static_cast<float*>(out.get()),
                  static_cast<float*>(lse.get())},
                 workspace.launch());
  require(cudaStreamSynchronize(workspace.launch().stream), "merge_partials");
  testing::expect_merged(c, download<float>(out, c.old.size()),
                         download<float>(lse, c.old_lse.size()));
}

}  // namespace
}  // namespace sluice::cuda
