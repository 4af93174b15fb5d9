// Products of coded weights on GPUs with less shared memory than this one, on which blocks have
// fewer warps and slots, against fp64 sums over the weights that the codes stand for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/dense/coded.h"
#include "kernels/runtime/workspace.h"
#include "lib/weight_code.h"
#include "tests/kernels/device_data.h"
#include "tests/kernels/has_device.h"
#include "tests/support/elements.h"
#include "tests/support/random.h"

namespace sluice::cuda {
namespace {

using testing::Random;

// A coded matrix, in tiles and as the weights that its codes stand for.
struct Coded {
  DeviceBlock tiles;
  CodedMatrix matrix;
  std::vector<float> weights;

  Coded(std::int64_t outputs, std::int64_t inputs, WeightCode code, Random& random,
        const Launch& launch)
      : weights(random.normal(outputs * inputs)) {
    const WeightFormat format = code;
    std::vector<std::byte> rows = testing::encoded(weights, DType::f32);
    std::vector<float> scratch(static_cast<std::size_t>(inputs));
    WeightRows coded =
        encode_rows({rows.data(), DType::f32, outputs, inputs}, format, scratch.data());
    for (std::int64_t row = 0; row < outputs; ++row) {
      decode_row(rows.data() + static_cast<std::size_t>(row) * format.row_bytes(inputs), format,
                 inputs, weights.data() + row * inputs);
    }
    matrix = {nullptr, code, outputs, inputs};
    tiles = make_device_block(matrix.bytes());
    matrix.tiles = static_cast<std::byte*>(tiles.get());
    const DeviceBlock on_device = upload(rows);
    coded.data = on_device.get();
    pack_rows(matrix, 0, coded, launch);
    require(cudaStreamSynchronize(launch.stream), "packing rows");
  }
};

class CodedProduct : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!has_device()) GTEST_SKIP() << "no GPU";
    workspace_ = std::make_unique<Workspace>(std::size_t{64} << 20);
    limits_ = workspace_->device();
  }

  Launch launch() const {
    Launch launch = workspace_->launch();
    launch.device = &limits_;
    return launch;
  }

  // y += x W^T + bias in rows that are longer than the outputs; the same bits every time. `error`:
  // of a sum, relative to that of its terms' magnitudes.
  void expect_product(const Coded& coded, std::int64_t tokens, DType dtype, double error) {
    SCOPED_TRACE(::testing::Message()
                 << to_string(WeightFormat(coded.matrix.code)) << ' ' << coded.matrix.outputs
                 << " x " << coded.matrix.inputs << ", " << limits_.shared_bytes
                 << " bytes of shared memory, " << to_string(dtype) << ", " << tokens << " tokens");
    const auto [outputs, inputs] = std::pair(coded.matrix.outputs, coded.matrix.inputs);
    const std::int64_t stride = outputs + 3;
    const std::vector<float> x = testing::rounded(random_.normal(tokens * inputs), dtype);
    const std::vector<float> bias = random_.normal(outputs);
    const std::vector<float> before = random_.normal(tokens * stride);
    const DeviceBlock device_x = upload(testing::encoded(x, dtype));
    const DeviceBlock device_bias = upload(bias);
    const auto product = [&] {
      const DeviceBlock y = upload(before);
      LinearParams p;
      p.x = {device_x.get(), dtype, tokens, inputs, inputs};
      p.bias = static_cast<const float*>(device_bias.get());
      p.y = {y.get(), DType::f32, tokens, outputs, stride};
      p.accumulate = true;
      multiply_tiles(p, coded.matrix, launch());
      require(cudaStreamSynchronize(launch().stream), "a product");
      return download<float>(y, before.size());
    };
    const std::vector<float> actual = product();
    ASSERT_EQ(product(), actual);
    for (std::int64_t token = 0; token < tokens; ++token) {
      // The first, the last and some between them, others for every token.
      for (std::int64_t output = 0; output < stride; output += output < outputs - 1 ? 7 : 1) {
        const auto at = static_cast<std::size_t>(token * stride + output);
        if (output >= outputs) {
          ASSERT_EQ(actual[at], before[at]) << "behind the outputs";
          continue;
        }
        double sum = double{before[at]} + bias[static_cast<std::size_t>(output)];
        double size = std::abs(sum);
        for (std::int64_t i = 0; i < inputs; ++i) {
          const double term = double{x[static_cast<std::size_t>(token * inputs + i)]} *
                              coded.weights[static_cast<std::size_t>(output * inputs + i)];
          sum += term;
          size += std::abs(term);
        }
        ASSERT_NEAR(actual[at], sum, error * size) << "token " << token << ", output " << output;
      }
    }
  }

  const std::uint64_t seed_ = testing::seed(61);
  Random random_{seed_};
  std::unique_ptr<Workspace> workspace_;
  DeviceLimits limits_;
  ::testing::ScopedTrace trace_{__FILE__, __LINE__, testing::seed_message(seed_)};
};

// 99 KiB are an RTX 3090's to 5090's, 163 an A100's. Weights, their scales and offsets are rounded
// to the dtype.
TEST_F(CodedProduct, OfBatchesInEverySharedMemory) {
  struct Shape {
    std::int64_t outputs, inputs;
  };
  // Parts of 128 outputs that many blocks share; that a block and its neighbour share; several for
  // each block. 81 and 17,000 outputs end within a tile, 96 and 4,000 inputs within a column.
  for (const Shape& shape : {Shape{81, 4000}, Shape{1300, 2048}, Shape{17000, 96}}) {
    for (const WeightCode code : {WeightCode::int8, WeightCode::int4}) {
      const Coded coded(shape.outputs, shape.inputs, code, random_, launch());
      for (const int kibibytes : {99, 163, 227}) {
        limits_.shared_bytes = std::min(kibibytes << 10, workspace_->device().shared_bytes);
        for (const std::int64_t tokens : {9, 16, 17, 33, 48, 64}) {
          expect_product(coded, tokens, DType::bf16, 0x1p-7);
          expect_product(coded, tokens, DType::f16, 0x1p-10);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Codes are exact, and only sums are rounded, in f32, where the inputs of few tokens fit in shared
// memory.
TEST_F(CodedProduct, OfFewTokensIsExact) {
  if (limits_.shared_bytes < 200 << 10) GTEST_SKIP() << "too little shared memory";
  for (const WeightCode code : {WeightCode::int8, WeightCode::int4}) {
    const Coded coded(81, 4000, code, random_, launch());
    for (const DType dtype : {DType::bf16, DType::f16}) {
      for (const std::int64_t tokens : {1, 2, 3, 8}) {
        expect_product(coded, tokens, dtype, 0x1p-18);
      }
    }
  }
}

}  // namespace
}  // namespace sluice::cuda
