// Value tiles that are read while the selected rows still come from the host.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/runtime/workspace.h"
#include "kernels/values/weigh.h"
#include "tests/kernels/has_device.h"
#include "tests/kernels/values/device_problem.h"

namespace sluice::cuda {
namespace {

// The same problem's rows in host memory, pages of all sequences one after the other, but for the
// newest pages, which are on the device.
class HomeRows {
 public:
  HomeRows(const ValueProblem& problem, std::uint64_t seed)
      : shape_(problem.of().shape()),
        pages_((problem.of().capacity() - 1) / kPageTokens + 1),
        count_(problem.of().count()) {
    testing::Random random(seed);
    std::vector<std::uint16_t> rows;
    for (const float x : random.normal(shape_.kv_heads * head_bytes() / 2)) {
      rows.push_back(float_to_bf16(x));
    }
    const std::size_t bytes = rows.size() * sizeof(std::uint16_t);
    host_ = make_pinned_block(bytes);
    std::memcpy(host_.get(), rows.data(), bytes);
    device_ = upload(rows);
    std::vector<PageSlots> table(static_cast<std::size_t>(count_ * pages_));
    for (std::size_t i = 0; i < table.size(); ++i) {
      const auto slot = static_cast<std::int32_t>(i);
      const BatchToken token = problem.tokens[i / static_cast<std::size_t>(pages_)];
      const bool is_newest = slot % pages_ == token.position / kPageTokens;
      (is_newest ? table[i].device : table[i].host) = slot;
    }
    table_ = upload(table);
    q_ = upload(random.normal(count_ * shape_.query_heads * shape_.head_dim));
  }

  AttendSelectedParams params(const AttendTilesParams& tiles) const {
    AttendSelectedParams p;
    p.q = static_cast<const float*>(q_.get());
    p.q_stride = std::int64_t{shape_.query_heads} * shape_.head_dim;
    p.shape = shape_;
    p.batch = tiles.batch;
    p.selected = tiles.selected;
    p.rows.device = static_cast<std::byte*>(device_.get());
    p.rows.device_stride = head_bytes();
    p.rows.host = static_cast<std::byte*>(host_.get());
    p.rows.host_stride = head_bytes();
    p.rows.pages = static_cast<const PageSlots*>(table_.get());
    p.rows.table_stride = pages_;
    p.scale = 0.1f;
    p.out = tiles.out;
    p.lse = tiles.lse;
    return p;
  }

 private:
  std::int64_t head_bytes() const {
    return count_ * pages_ * kPageTokens * static_cast<std::int64_t>(shape_.row_bytes());
  }

  KvShape shape_;
  std::int64_t pages_;  // of a sequence
  std::int64_t count_;
  PinnedBlock host_;
  DeviceBlock device_, table_, q_;
};

// One after the other, then beside each other: the same bits, as often as it is tried.
void check_beside(const ValueCase& c, std::uint64_t seed, bool is_weighed) {
  SCOPED_TRACE(testing::seed_message(seed) + " " + c.name() + (is_weighed ? " weighed" : ""));
  ValueProblem problem(c, seed);
  const Workspace workspace(std::size_t{64} << 20);
  const Launch all = workspace.launch();
  const DeviceProblem device(problem, true);
  const HomeRows rows(problem, seed);
  AttendTilesParams tiles = device.params();
  const std::int64_t heads = problem.heads_in_all();
  const DeviceBlock weights =
      make_device_block(static_cast<std::size_t>(heads * LogitDigest::pages_of(problem.stride)) *
                        PageWeights::kPageBytes);
  if (is_weighed) tiles.logits.digest.weights = static_cast<std::byte*>(weights.get());
  const auto run = [&](bool is_beside) {
    if (is_weighed) {
      weigh_pages({tiles.shape, tiles.batch, tiles.logits, tiles.selected, tiles.estimated_lse,
                   PageWeights::of(tiles.logits.digest, c.group)},
                  all);
    }
    attend_decode_selected(rows.params(tiles), all.half(false));
    attend_tiles(tiles, all.half(true), is_beside);
    require(cudaStreamSynchronize(all.stream), "attend_tiles");
  };
  device.reset();
  run(false);
  const std::vector<float> out = device.out();
  const std::vector<float> lse = device.lse();
  for (int turn = 0; turn < 30; ++turn) {
    device.reset();
    run(true);
    ASSERT_EQ(device.out(), out) << "turn " << turn;
    ASSERT_EQ(device.lse(), lse) << "turn " << turn;
  }
}

TEST(CudaAttendTiles, BesideSelectedRowsAsAfterThem) {
  if (!has_device()) GTEST_SKIP() << "no CUDA device";
  std::uint64_t seed = testing::seed(70);
  for (const bool is_weighed : {true, false}) {
    check_beside({128, 4, 2, 0.9f, {32000}, 32, 8, true}, ++seed, is_weighed);
    check_beside({64, 4, 2, 0.9f, {9000, 77, 20000}, 64, 2, true}, ++seed, is_weighed);
    check_beside({128, 8, 3, 1.0f, {5000, 8191}, 16, 2, true}, ++seed, is_weighed);
  }
}

}  // namespace
}  // namespace sluice::cuda
