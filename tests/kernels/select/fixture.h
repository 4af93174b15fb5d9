// Every way of selecting, whatever device there is: which is taken follows from what the device is
// said to have.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "kernels/runtime/error.h"
#include "kernels/runtime/workspace.h"
#include "kernels/select/select.h"
#include "kernels/values/values.h"
#include "tests/kernels/has_device.h"
#include "tests/kernels/select/cases.h"
#include "tests/kernels/select/truth.h"

namespace sluice::cuda {

inline constexpr std::size_t kScratch = std::size_t{192} << 20;

// The ways of select.h; a cluster and the chain with a digest and without.
enum class Path { block, cluster, digested_cluster, chain, digested_chain };

class Select : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
    workspace_.emplace(kScratch);
    limits_ = workspace_->device();
    // Which path is taken follows from these alone.
    if (GetParam() == Path::chain || GetParam() == Path::digested_chain) limits_.shared_bytes = 0;
    if (GetParam() == Path::block) limits_.multiprocessors = 1;
    if (is_clustered()) limits_.multiprocessors = 1 << 20;
    limits_.digested_entries = 0;
    // Nothing may be taken for granted of scratch.
    require(cudaMemset(launch().scratch, 0xa5, kScratch), "memset");
  }
  static bool is_clustered() {
    return GetParam() == Path::cluster || GetParam() == Path::digested_cluster;
  }
  static bool digested(const Case& c) {
    const bool is = GetParam() == Path::digested_chain || GetParam() == Path::digested_cluster;
    return is && c.candidates.empty();
  }
  Launch launch() const {
    Launch launch = workspace_->launch();
    launch.device = &limits_;
    return launch;
  }
  Answer run(const Case& c) const {
    const Problem problem(c, digested(c));
    select_and_weigh(problem, launch());
    require(cudaStreamSynchronize(launch().stream), "select");
    return problem.answer();
  }
  // With what stands behind a selection that leaves page weights to others.
  void select_and_weigh(const Problem& problem, const Launch& launch) const {
    select(problem.params(), launch);
    if (problem.params().logits.digest.weights != nullptr &&
        !leaves_page_weights(problem.params(), limits_)) {
      weigh_pages(problem.params(), launch);
    }
  }
  void check_case(const Case& c) const {
    const Answer a = run(c);
    const Answer b = run(c);
    EXPECT_EQ(a.positions, b.positions);
    EXPECT_EQ(a.alpha, b.alpha);
    for (int head = 0; head < c.heads(); ++head) {
      SCOPED_TRACE("head " + std::to_string(head) + " at " +
                   std::to_string(c.token(head).position));
      expect_head(c, a, head);
      if (HasFailure()) return;
    }
  }

  std::optional<Workspace> workspace_;
  DeviceLimits limits_;
};

inline std::string name_of(const ::testing::TestParamInfo<Path>& path) {
  switch (path.param) {
    case Path::block:
      return "block";
    case Path::cluster:
      return "cluster";
    case Path::digested_cluster:
      return "digested_cluster";
    case Path::chain:
      return "chain";
    case Path::digested_chain:
      break;
  }
  return "digested_chain";
}

inline constexpr auto kPaths = std::to_array(
    {Path::block, Path::cluster, Path::digested_cluster, Path::chain, Path::digested_chain});

}  // namespace sluice::cuda
