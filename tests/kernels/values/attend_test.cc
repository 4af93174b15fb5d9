// Attention over value tiles on the device, by its definition.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "kernels/values/values.h"
#include "lib/half.h"
#include "sluice/errors.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/digest_truth.h"
#include "tests/kernels/has_device.h"
#include "tests/support/partial_cases.h"
#include "tests/support/value_cases.h"

namespace sluice::cuda {
namespace {

using testing::ValueAnswer;
using testing::ValueCase;
using testing::ValueProblem;

constexpr std::size_t kScratch = std::size_t{32} << 20;
constexpr std::uint16_t kNan = 0x7e00;

// The digest of a problem's whole pages, as a scan leaves it; NaN for pages that there are not.
std::vector<std::byte> digest_of(const ValueProblem& problem) {
  const ValueCase& c = problem.of();
  const std::int64_t rows = c.count() * c.query_heads();
  std::vector<std::byte> bytes(PageDigest::bytes_of(rows, problem.stride), std::byte{0xff});
  const auto digest = PageDigest::of(LogitDigest::in(bytes.data(), rows, problem.stride));
  for (std::int64_t query = 0; query < rows; ++query) {
    const BatchToken token = problem.tokens[static_cast<std::size_t>(query / c.query_heads())];
    for (std::int64_t page = 0; page < token.pages(); ++page) {
      const std::int64_t place =
          (query / c.group * digest.pages + page) * c.group + query % c.group;
      const float* const first = problem.logits_of(query) + page * kPageTokens;
      for (int part = 0; part < kBoundsPerPage; ++part) {
        digest.maxima[place * kBoundsPerPage + part] =
            float_to_f16(largest_of(first + part * kBoundTokens, kBoundTokens));
      }
      digest.sums[place] = digest_sum(first);
    }
  }
  return bytes;
}

// A problem in the device's memory.
class DeviceProblem {
 public:
  DeviceProblem(ValueProblem& problem, bool with_digest)
      : problem_(problem),
        tokens_(upload(problem.tokens)),
        pages_(upload(problem.pages)),
        table_(upload(problem.table)),
        logits_(upload(halves_of(problem))),
        digest_(upload(digest_of(problem))),
        estimated_lse_(upload(problem.estimated_lse)),
        positions_(upload(problem.positions)),
        heads_(make_pinned_block(problem.heads.size() * sizeof(HeadSelection))),
        sums_(upload(problem.sums)),
        out_(upload(problem.out)),
        lse_(upload(problem.lse)),
        pages_read_(make_pinned_block(problem.pages_read.size() * sizeof(std::int32_t))),
        with_digest_(with_digest) {
    std::memcpy(heads_.get(), problem.heads.data(), problem.heads.size() * sizeof(HeadSelection));
  }

  AttendTilesParams params() const {
    AttendTilesParams p = problem_.params();
    p.batch.tokens = static_cast<const BatchToken*>(tokens_.get());
    p.logits.data = static_cast<std::byte*>(logits_.get());
    if (with_digest_) {
      p.logits.digest = LogitDigest::in(static_cast<std::byte*>(digest_.get()),
                                        std::ssize(problem_.lse), problem_.stride);
    }
    p.estimated_lse = static_cast<const float*>(estimated_lse_.get());
    p.selected.positions = static_cast<std::int32_t*>(positions_.get());
    p.selected.heads = static_cast<HeadSelection*>(heads_.get());
    p.values.tiles.pages = static_cast<std::byte*>(pages_.get());
    p.values.slots = static_cast<const std::int32_t*>(table_.get());
    p.value_sums = static_cast<const float*>(sums_.get());
    p.out = static_cast<float*>(out_.get());
    p.lse = static_cast<float*>(lse_.get());
    p.pages_read = static_cast<std::int32_t*>(pages_read_.get());
    return p;
  }

  // Puts back what was in out and lse before.
  void reset() const {
    const auto copy = [](const DeviceBlock& to, const std::vector<float>& from) {
      copy_in(to.get(), from.data(), from.size() * 4);
    };
    copy(out_, problem_.out);
    copy(lse_, problem_.lse);
    std::memset(pages_read_.get(), 0xff, problem_.pages_read.size() * sizeof(std::int32_t));
  }
  std::vector<float> out() const { return download<float>(out_, problem_.out.size()); }
  std::vector<float> lse() const { return download<float>(lse_, problem_.lse.size()); }
  // Once for all parts of a group.
  std::vector<std::int32_t> pages_read() const {
    const auto* const read = static_cast<const std::int32_t*>(pages_read_.get());
    std::vector<std::int32_t> pages(read, read + problem_.pages_read.size());
    const int parts = (problem_.of().group + kTileQueries - 1) / kTileQueries;
    for (std::int32_t& count : pages) {
      EXPECT_EQ(count % parts, 0);
      count /= parts;
    }
    return pages;
  }

 private:
  static std::vector<std::uint16_t> halves_of(const ValueProblem& problem) {
    std::vector<std::uint16_t> halves;
    for (const float x : problem.logits) halves.push_back(std::isnan(x) ? kNan : float_to_f16(x));
    return halves;
  }

  ValueProblem& problem_;
  DeviceBlock tokens_;
  DeviceBlock pages_;
  DeviceBlock table_;
  DeviceBlock logits_;
  DeviceBlock digest_;
  DeviceBlock estimated_lse_;
  DeviceBlock positions_;
  PinnedBlock heads_;
  DeviceBlock sums_;
  DeviceBlock out_;
  DeviceBlock lse_;
  PinnedBlock pages_read_;
  bool with_digest_;
};

// Weights are f16 where they meet codes, relative to the heaviest of their page.
constexpr double kWeightError = 0x1p-11;

void expect_equal(const ValueCase& c, const DeviceProblem& device, const ValueAnswer& wanted) {
  testing::ValueTolerance tolerance = testing::tolerance_of(c, kWeightError);
  tolerance.lse = 1e-4;
  testing::expect_answer(wanted, device.out(), device.lse(), device.pages_read(), tolerance);
}

void check_case(const ValueCase& c, std::uint64_t seed, bool with_digest,
                std::size_t scratch = kScratch) {
  SCOPED_TRACE(testing::seed_message(seed) + " " + c.name() +
               (with_digest ? " digested" : " without a digest"));
  ValueProblem problem(c, seed);
  const Workspace workspace(scratch);
  require(cudaMemset(workspace.launch().scratch, 0xff, scratch), "memset");
  const DeviceProblem device(problem, with_digest);
  const ValueAnswer wanted = testing::answer_of(problem);
  std::vector<float> first;
  // Twice: nothing may be left behind, and nothing depend on timing.
  for (int turn = 0; turn < 2; ++turn) {
    device.reset();
    attend_tiles(device.params(), workspace.launch());
    require(cudaStreamSynchronize(workspace.launch().stream), "attend_tiles");
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

// A few tokens at a time where there is little scratch.
TEST(CudaAttendTiles, OfLargeBatches) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  ValueCase c{64, 4, 2, 0.9f, {}, 16, 2, true};
  for (std::int32_t i = 0; i < 24; ++i) c.positions.push_back(37 + i * 113);
  for (const bool with_digest : {false, true}) {
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
