// Scores from raw rows and from page bounds: memory-bound, with the processor's widest vectors.
#include "cpu/scan/key_score.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/scan/key_score_rows.cc"
#include <hwy/foreach_target.h>
// Highway compiles what follows once per instruction set.
#include "cpu/runtime/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu {
namespace HWY_NAMESPACE {

template <typename T>
void score_all_channels(const RowScan& scan, const float* q, float factor, float* logits) {
  const auto d = static_cast<std::size_t>(scan.head_dim);
  const std::size_t whole = d / kLanes * kLanes;
  for (std::int64_t row = 0; row < scan.count; ++row) {
    const auto* const key =
        reinterpret_cast<const T*>(scan.rows + static_cast<std::size_t>(row) * scan.row_bytes);
    VF sum = hn::Zero(DF());
    for (std::size_t c = 0; c < whole; c += kLanes) {
      sum = hn::MulAdd(load_floats(q + c), load_channels(key, c), sum);
    }
    float total = sum_lanes(sum);
    for (std::size_t c = whole; c < d; ++c) total += q[c] * load_channel(key, c);
    logits[row] = total * factor * scale_of(key);
  }
}

template <typename T>
void score_listed(const RowScan& scan, const float* q, float factor, const ChannelList& channels,
                  float* logits) {
  for (std::int64_t row = 0; row < scan.count; ++row) {
    const auto* const key =
        reinterpret_cast<const T*>(scan.rows + static_cast<std::size_t>(row) * scan.row_bytes);
    float total = 0.0f;
    for (std::size_t i = 0; i < static_cast<std::size_t>(channels.count); ++i) {
      const std::size_t c = channels.index[i];
      total += q[c] * load_channel(key, c);
    }
    logits[row] = total * factor * scale_of(key);
  }
}

template <typename T>
void score_typed(const RowScan& scan, const float* q, float factor, const ChannelList& channels,
                 float* logits) {
  if (channels.count == scan.head_dim) {
    score_all_channels<T>(scan, q, factor, logits);
  } else {
    score_listed<T>(scan, q, factor, channels, logits);
  }
}

void rows_kernel(const RowScan& scan, const float* q, float factor, const ChannelList& channels,
                 float* logits) {
  dispatch_key(scan.format, [&](auto channel) {
    score_typed<decltype(channel)>(scan, q, factor, channels, logits);
  });
}

void bounds_kernel(const std::uint16_t* bounds, int head_dim, const float* q, float factor,
                   float* logits) {
  const auto d = static_cast<std::size_t>(head_dim);
  const std::size_t whole = d / kLanes * kLanes;
  const auto* low = reinterpret_cast<const hwy::float16_t*>(bounds);
  for (std::size_t part = 0; part < kBoundsPerPage; ++part, low += 2 * d) {
    const hwy::float16_t* const high = low + d;
    VF sum = hn::Zero(DF());
    for (std::size_t c = 0; c < whole; c += kLanes) {
      const VF query = load_floats(q + c);
      sum = hn::Add(sum, hn::Max(hn::Mul(query, load_floats(low + c)),
                                 hn::Mul(query, load_floats(high + c))));
    }
    float total = sum_lanes(sum);
    for (std::size_t c = whole; c < d; ++c) {
      total += HWY_MAX(q[c] * load_float(low + c), q[c] * load_float(high + c));
    }
    for (std::size_t t = 0; t < kBoundTokens; ++t) logits[part * kBoundTokens + t] = total * factor;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace sluice::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {

HWY_EXPORT(rows_kernel);
HWY_EXPORT(bounds_kernel);

void score_rows(const RowScan& scan, const float* q, float factor, const ChannelList& channels,
                float* logits) {
  HWY_DYNAMIC_DISPATCH(rows_kernel)(scan, q, factor, channels, logits);
}

void score_bounds(const std::uint16_t* bounds, int head_dim, const float* q, float factor,
                  float* logits) {
  HWY_DYNAMIC_DISPATCH(bounds_kernel)(bounds, head_dim, q, factor, logits);
}

}  // namespace sluice::cpu
#endif  // HWY_ONCE
