// column_sums() on CUDA against fp64.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/runtime/error.h"
#include "kernels/runtime/owners.h"
#include "kernels/runtime/workspace.h"
#include "kernels/scan/scan.h"
#include "lib/backend/index_ops.h"
#include "sluice/half.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

using sluice::testing::Random;

struct Case {
  KvShape shape;
  std::int64_t count = 0;
  std::vector<std::int64_t> positions;
  std::vector<float> q;                          // [probes, query_heads, head_dim]
  std::vector<std::vector<std::uint16_t>> rows;  // [kv_heads][count, row_bytes / 2]

  float key(int head, std::int64_t row, int channel) const {
    const std::uint16_t bits = rows[static_cast<std::size_t>(head)]
                                   [static_cast<std::size_t>(row) * (shape.row_bytes() / 2) +
                                    static_cast<std::size_t>(channel)];
    return shape.rows.element == DType::f16 ? f16_to_float(bits) : bf16_to_float(bits);
  }
};

Case random_case(Random& random, int head_dim, DType dtype, std::int64_t count, int probes) {
  Case c;
  const auto groups = std::to_array({1, 2, 4, 7});
  const int kv_heads = static_cast<int>(random.integer(1, 3));
  c.shape = {1, kv_heads * groups[static_cast<std::size_t>(random.integer(0, 3))], kv_heads,
             head_dim, dtype};
  c.count = count;
  for (int i = 0; i < probes; ++i) c.positions.push_back(random.integer(0, count - 1));
  c.positions.back() = count - 1;
  c.q = random.normal(static_cast<std::int64_t>(probes) * c.shape.query_heads * head_dim, 2.0f);
  const std::size_t words = c.shape.row_bytes() / 2;
  for (int head = 0; head < kv_heads; ++head) {
    // Values and padding are none of its business.
    std::vector<std::uint16_t> rows(static_cast<std::size_t>(count) * words, 0x7fff);
    for (std::int64_t t = 0; t < count; ++t) {
      const std::vector<float> key = random.normal(head_dim, 1.0f);
      for (std::size_t i = 0; i < key.size(); ++i) {
        rows[static_cast<std::size_t>(t) * words + i] =
            dtype == DType::f16 ? float_to_f16(key[i]) : float_to_bf16(key[i]);
      }
    }
    c.rows.push_back(std::move(rows));
  }
  return c;
}

std::vector<double> truth_of(const Case& c) {
  std::vector<double> sums(static_cast<std::size_t>(c.count));
  for (std::size_t probe = 0; probe < c.positions.size(); ++probe) {
    for (int head = 0; head < c.shape.query_heads; ++head) {
      const float* const q =
          c.q.data() +
          (static_cast<std::int64_t>(probe) * c.shape.query_heads + head) * c.shape.head_dim;
      std::vector<double> weights;
      double total = 0.0;
      for (std::int64_t t = 0; t <= c.positions[probe]; ++t) {
        double logit = 0.0;
        for (int i = 0; i < c.shape.head_dim; ++i) {
          logit +=
              static_cast<double>(q[i]) * static_cast<double>(c.key(head / c.shape.group(), t, i));
        }
        weights.push_back(std::exp(logit / std::sqrt(c.shape.head_dim)));
        total += weights.back();
      }
      for (std::size_t t = 0; t < weights.size(); ++t) sums[t] += weights[t] / total;
    }
  }
  return sums;
}

class ColumnSums : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no CUDA device";
  }

  static std::vector<float> run(const Case& c, std::size_t scratch = std::size_t{64} << 20) {
    const Workspace workspace(scratch);
    std::vector<DeviceBlock> blocks;
    const auto upload = [&](const auto& host) {
      const std::size_t bytes = host.size() * sizeof(host[0]);
      blocks.push_back(make_device_block(std::max<std::size_t>(bytes, 16)));
      copy_in(blocks.back().get(), host.data(), bytes);
      return blocks.back().get();
    };
    const PinnedBlock sums = make_pinned_block(static_cast<std::size_t>(c.count) * sizeof(float));
    std::memset(sums.get(), 0x55, static_cast<std::size_t>(c.count) * sizeof(float));
    std::vector<std::uint16_t> all;
    for (const auto& head : c.rows) all.insert(all.end(), head.begin(), head.end());
    const auto* const first = static_cast<const std::byte*>(upload(all));
    std::vector<RowSpan> rows;
    for (std::size_t head = 0; head < c.rows.size(); ++head) {
      rows.push_back({first + head * c.rows[0].size() * sizeof(std::uint16_t), c.count});
    }
    ColumnSumsParams p;
    p.q = static_cast<const float*>(upload(c.q));
    p.positions = c.positions;
    p.shape = c.shape;
    p.rows = rows;
    p.sums = static_cast<float*>(sums.get());
    // A copy from pageable memory may still be under way, and other streams do not wait for it.
    require(cudaDeviceSynchronize(), "uploads");
    column_sums(p, workspace.launch());
    require(cudaStreamSynchronize(workspace.launch().stream), "column_sums");
    return {p.sums, p.sums + c.count};
  }
};

TEST_F(ColumnSums, MatchTheirDefinition) {
  const std::uint64_t seed = testing::seed(21);
  SCOPED_TRACE(testing::seed_message(seed));
  Random random(seed);
  for (const int head_dim : {32, 64, 80, 96, 128, 256}) {
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const std::int64_t count : {1, 17, 128, 700}) {
        const Case c = random_case(random, head_dim, dtype, count,
                                   static_cast<int>(random.integer(1, count == 128 ? 200 : 30)));
        SCOPED_TRACE("head_dim " + std::to_string(head_dim) + " rows " + std::to_string(count) +
                     " probes " + std::to_string(c.positions.size()));
        const std::vector<double> expected = truth_of(c);
        const std::vector<float> sums = run(c);
        for (std::size_t t = 0; t < sums.size(); ++t) {
          ASSERT_NEAR(static_cast<double>(sums[t]), expected[t], 1e-6 + 5e-5 * expected[t]) << t;
        }
        // With so little room that many keys have to be read twice.
        const std::size_t fragments = static_cast<std::size_t>((head_dim + 31) / 32) << 16;
        EXPECT_EQ(run(c, c.rows.size() * (fragments + 60000)), sums);
        EXPECT_EQ(run(c, fragments + 60000), sums) << "a KV head at a time";
      }
    }
  }
}

TEST_F(ColumnSums, AreNoNumbersIfALogitIsNone) {
  Random random(testing::seed(22));
  Case c = random_case(random, 64, DType::bf16, 300, 5);
  c.rows[0][123 * (c.shape.row_bytes() / 2) + 7] = float_to_bf16(std::nanf(""));
  for (const float sum : run(c)) EXPECT_TRUE(std::isnan(sum));
}

}  // namespace
}  // namespace sluice::cuda
