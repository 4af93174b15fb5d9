#include "cpu/dense/coded_linear.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "cpu/runtime/elementwise.h"
#include "cpu/runtime/threads.h"
#include "lib/bytes.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Most tokens for the kernels that decode in registers; for more, widening tiles is faster.
constexpr std::int64_t kFewCodedTokens = 8;
// Elements of a tile that a thread widens, unless 16 outputs have more.
constexpr std::int64_t kTileElements = std::int64_t{1} << 18;
constexpr std::int64_t kMostTileOutputs = 64;

std::int64_t tile_outputs(std::int64_t inputs) {
  const std::int64_t fit = kTileElements / inputs / kCodedBlock * kCodedBlock;
  return std::clamp(fit, kCodedBlock, kMostTileOutputs);
}

// Memory of the calling thread. It grows to what was asked for, and keeps it.
std::byte* tile_of(std::size_t bytes) {
  thread_local std::vector<std::byte> tile;
  if (tile.size() < bytes) tile.resize(bytes);
  return tile.data();
}
float* inputs_of(std::size_t floats) {
  thread_local std::vector<float> inputs;
  if (inputs.size() < floats) inputs.resize(floats);
  return inputs.data();
}

// Floats of the inputs of few tokens, and of the sums over their groups.
std::int64_t few_floats(std::int64_t inputs) {
  return kFewCodedTokens * (inputs + inputs / kWeightGroup);
}

void sum_groups(const float* x, std::int64_t groups, float* sums) {
  for (std::int64_t group = 0; group < groups; ++group) {
    float sum = 0.0f;
    for (std::int64_t i = 0; i < kWeightGroup; ++i) sum += x[group * kWeightGroup + i];
    sums[group] = sum;
  }
}

}  // namespace

CodedLinear::CodedLinear(Threads& threads, DType compute)
    : threads_(&threads), compute_(compute), onednn_(compute, OneDnn::Weights::columns) {}

std::uint64_t CodedLinear::widened_bytes(const WeightShape& shape) const {
  const std::int64_t elements = tile_outputs(shape.inputs) * shape.inputs * threads_->count();
  return static_cast<std::uint64_t>(elements) * size_of(compute_);
}

std::uint64_t CodedLinear::scratch_bytes(const WeightShape& shape) const {
  const std::int64_t tile = tile_outputs(shape.inputs);
  const std::uint64_t many =
      onednn_.scratch_bytes(kMaxTokens, shape.inputs, tile, shape.outputs > tile);
  const auto few = static_cast<std::uint64_t>(few_floats(shape.inputs)) * sizeof(float);
  return static_cast<std::uint64_t>(threads_->count()) * many + few;
}

void CodedLinear::write(const CodedWeight& weight, std::int64_t first, const WeightRows& rows) {
  const CodedMatrix& to = weight.matrix();
  check(rows.format == to.format && rows.inputs == to.inputs && first + rows.rows <= to.outputs,
        "write_weight: formats or shapes disagree");
  check(
      first % kCodedBlock == 0 && (rows.rows % kCodedBlock == 0 || first + rows.rows == to.outputs),
      "write_weight: a part of a block");
  pack_rows(to, first, rows.rows, static_cast<const std::byte*>(rows.data));
}

void CodedLinear::run(const LinearParams& params, const CodedWeight& weight) {
  if (params.x.rows <= kFewCodedTokens) return multiply_few(params, weight.matrix());
  multiply_many(params, weight.matrix());
}

// A part of the outputs per thread, of whole blocks.
void CodedLinear::multiply_few(const LinearParams& p, const CodedMatrix& weights) {
  const std::int64_t tokens = p.x.rows;
  const std::int64_t groups = weights.inputs / kWeightGroup;
  float* const x = inputs_of(static_cast<std::size_t>(few_floats(weights.inputs)));
  float* const sums = x + kFewCodedTokens * weights.inputs;
  convert(p.x.data, compute_, x, DType::f32, tokens * weights.inputs);
  for (std::int64_t t = 0; t < tokens; ++t) {
    sum_groups(x + t * weights.inputs, groups, sums + t * groups);
  }
  const std::int64_t blocks = (weights.outputs + kCodedBlock - 1) / kCodedBlock;
  const std::int64_t part = (blocks + threads_->count() - 1) / threads_->count() * kCodedBlock;
  const auto bytes = static_cast<std::int64_t>(
      CodedMatrix::bytes(weights.format, weights.outputs, weights.inputs));
  threads_->for_each((weights.outputs + part - 1) / part,
                     [&](std::int64_t i) {
                       CodedProduct product;
                       product.weights = weights;
                       product.first = i * part;
                       product.outputs = std::min(part, weights.outputs - product.first);
                       product.x = x;
                       product.sums = sums;
                       product.tokens = tokens;
                       product.bias = p.bias == nullptr ? nullptr : p.bias + product.first;
                       product.y = static_cast<float*>(p.y.data) + product.first;
                       product.y_stride = p.y.stride;
                       product.accumulate = p.accumulate;
                       multiply_coded(product);
                     },
                     bytes);
}

// Widens a tile of outputs at a time, because many tokens share its cost. Tokens are taken in
// powers of two, so that few primitives serve any number of them.
void CodedLinear::multiply_many(const LinearParams& p, const CodedMatrix& weights) {
  const std::int64_t tile = tile_outputs(weights.inputs);
  threads_->for_each((weights.outputs + tile - 1) / tile, [&](std::int64_t i) {
    const std::int64_t first = i * tile;
    const std::int64_t outputs = std::min(tile, weights.outputs - first);
    std::byte* const widened =
        tile_of(static_cast<std::size_t>(tile * weights.inputs) * size_of(compute_));
    widen_columns(weights, first, outputs, compute_, widened);
    for (std::int64_t token = 0; token < p.x.rows;) {
      const auto left = static_cast<std::uint64_t>(p.x.rows - token);
      const auto tokens = std::min(kMaxTokens, static_cast<std::int64_t>(std::bit_floor(left)));
      Product product;
      product.tokens = tokens;
      product.inputs = weights.inputs;
      product.outputs = outputs;
      product.y_stride = p.y.stride;
      product.x = row_of(p.x, token);
      product.weights = widened;
      product.bias = p.bias == nullptr ? nullptr : p.bias + first;
      product.y = static_cast<float*>(p.y.data) + token * p.y.stride + first;
      product.accumulate = p.accumulate;
      onednn_.multiply(product);
      token += tokens;
    }
  });
}

}  // namespace sluice::cpu
