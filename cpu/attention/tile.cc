#include "cpu/attention/tile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <numbers>

namespace sluice::cpu {
namespace {

// Log-sum-exp of an empty set.
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Weights {
  float before = 0.0f;
  float here = 0.0f;
  float lse = kNone;
};

// Weights of two disjoint partials in their union.
Weights weights_of(float before, float here) {
  if (before == kNone && here == kNone) return {};
  const double highest = std::max(before, here);
  const double lse = highest + std::log(std::exp(before - highest) + std::exp(here - highest));
  return {static_cast<float>(std::exp(before - lse)), static_cast<float>(std::exp(here - lse)),
          static_cast<float>(lse)};
}

// out = before * out + here * values. A side with weight 0 is not read, because it may be
// uninitialised.
void blend(const Weights& w, const SoftmaxState& state, float here, int head_dim, float* out) {
  for (int c = 0; c < head_dim; ++c) {
    float value =
        w.here == 0 ? 0.0f : here * state.values[static_cast<std::size_t>(c) * state.stride];
    if (w.before != 0) value += w.before * out[c];
    out[c] = value;
  }
}

struct AlignedDelete {
  void operator()(float* data) const { ::operator delete (data, std::align_val_t{kRowAlignment}); }
};

}  // namespace

std::int64_t AttendTile::visible_to(int m) const {
  const std::int64_t more = seen != nullptr ? seen[m / group] : m / group;
  return std::clamp<std::int64_t>(visible + more, 0, count);
}

std::int64_t AttendTile::first_of(int m) const {
  if (window == 0) return 0;
  return std::clamp<std::int64_t>(visible + m / group - window, 0, count);
}

void finish_query(const AttendTile& tile, int m, const SoftmaxState& state) {
  const double logits = (std::log2(static_cast<double>(state.sum)) + state.highest);
  const float lse =
      state.sum == 0 ? kNone : static_cast<float>(logits * std::numbers::ln2_v<double>);
  float* const out_lse = tile.lse + m / tile.group * tile.lse_stride + m % tile.group;
  float* const out = tile.out + m / tile.group * tile.out_stride +
                     static_cast<std::int64_t>(m % tile.group) * tile.head_dim;
  const Weights w = weights_of(tile.merge ? *out_lse : kNone, lse);
  blend(w, state, w.here / state.sum, tile.head_dim, out);
  *out_lse = w.lse;
}

void merge_partial(const float* values, float lse, int head_dim, float* out, float* out_lse) {
  const Weights w = weights_of(*out_lse, lse);
  blend(w, {values, 1, 0, 0}, w.here, head_dim, out);
  *out_lse = w.lse;
}

float* thread_scratch(Scratch use, std::size_t floats) {
  struct Block {
    std::unique_ptr<float, AlignedDelete> data;
    std::size_t size = 0;
  };
  thread_local std::array<Block, 3> blocks;
  Block& block = blocks[static_cast<std::size_t>(use)];
  if (block.size < floats) {
    block = {};
    void* const data = ::operator new (floats * sizeof(float), std::align_val_t{kRowAlignment});
    block.data.reset(static_cast<float*>(data));
    block.size = floats;
  }
  return block.data.get();
}

}  // namespace sluice::cpu
