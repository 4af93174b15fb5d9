#include "lib/weight_code.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "lib/check.h"
#include "sluice/half.h"

namespace sluice {
namespace {

constexpr auto kGroup = static_cast<std::size_t>(kWeightGroup);
using Weights = std::array<float, kGroup>;

float stored(float value) { return f16_to_float(float_to_f16(value)); }

// The codes of a group under a scale and an offset, and their squared error.
struct Coded {
  std::array<float, kGroup> values = {};  // -128 to 127, or levels
  float scale = 0.0f;
  float offset = 0.0f;
  float error = std::numeric_limits<float>::infinity();
};

// The sum of term(i) over a group, in as many partial sums as a vector has lanes. Their order is
// the same whatever the instruction set.
template <typename Term>
[[gnu::always_inline]] inline float sum_of(const Term& term) {
  constexpr std::size_t kLanes = 16;
  std::array<float, kLanes> sums = {};
  for (std::size_t first = 0; first < kGroup; first += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) sums[lane] += term(first + lane);
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

[[gnu::always_inline]] inline void keep_better(const Weights& w, Coded& coded, Coded& best) {
  coded.error = sum_of([&](std::size_t i) {
    const float difference = w[i] - (coded.scale * coded.values[i] + coded.offset);
    return difference * difference;
  });
  if (coded.error < best.error) best = coded;
}

// Midpoints between levels.
constexpr std::array<float, 15> midpoints() {
  std::array<float, 15> middle = {};
  for (std::size_t i = 0; i < middle.size(); ++i) {
    middle[i] = 0.5f * static_cast<float>(kWeightLevels[i] + kWeightLevels[i + 1]);
  }
  return middle;
}

// Adds the steps between levels for every midpoint that a weight exceeds: no branches.
[[gnu::always_inline]] inline void take_nearest_levels(const Weights& w, float inverse_scale,
                                                       std::array<float, kGroup>& levels) {
  constexpr std::array<float, 15> kMiddle = midpoints();
  Weights scaled;
  for (std::size_t i = 0; i < kGroup; ++i) scaled[i] = w[i] * inverse_scale;
  levels.fill(kWeightLevels.front());
  for (std::size_t k = 0; k < kMiddle.size(); ++k) {
    const auto step = static_cast<float>(kWeightLevels[k + 1] - kWeightLevels[k]);
    for (std::size_t i = 0; i < kGroup; ++i) levels[i] += scaled[i] > kMiddle[k] ? step : 0.0f;
  }
}

// Tries scales under which the largest weight lies near the first or the last level; some clip it.
// Each gives the nearest levels, and these the least-squares scale. Twice as many scales would
// lower the squared error by 1 %.
[[gnu::always_inline]] inline Coded best_levels(const Weights& w) {
  constexpr int kLeastClip = -2;
  constexpr int kMostClip = 5;
  constexpr float kClipStep = 0.05f;
  float largest = 0.0f;
  for (const float x : w) largest = std::abs(x) > std::abs(largest) ? x : largest;
  Coded best;
  for (const std::int8_t end : {kWeightLevels.front(), kWeightLevels.back()}) {
    for (int clip = kLeastClip; clip <= kMostClip; ++clip) {
      const float clipped = largest * (1.0f - kClipStep * static_cast<float>(clip));
      Coded coded;
      take_nearest_levels(w, static_cast<float>(end) / clipped, coded.values);
      const float products = sum_of([&](std::size_t i) { return w[i] * coded.values[i]; });
      // No level is zero.
      const float squares =
          sum_of([&](std::size_t i) { return coded.values[i] * coded.values[i]; });
      coded.scale = stored(products / squares);
      keep_better(w, coded, best);
    }
  }
  return best;
}

// Fits scale and offset to the codes by least squares. Scale 0: the codes determine no line.
[[gnu::always_inline]] inline void fit_line(const Weights& w, Coded& coded) {
  constexpr float kCount = kGroup;
  const float sum = sum_of([&](std::size_t i) { return w[i]; });
  const float codes = sum_of([&](std::size_t i) { return coded.values[i]; });
  const float squares = sum_of([&](std::size_t i) { return coded.values[i] * coded.values[i]; });
  const float products = sum_of([&](std::size_t i) { return coded.values[i] * w[i]; });
  const float determinant = kCount * squares - codes * codes;
  const float scale = determinant > 0.0f ? (kCount * products - codes * sum) / determinant : 0.0f;
  coded.scale = stored(scale);
  coded.offset = stored((sum - coded.scale * codes) / kCount);
}

// Tries ranges widened or clipped on both sides, with the least-squares line for each one's codes.
[[gnu::always_inline]] inline Coded best_line(const Weights& w) {
  constexpr int kLeastClip = -3;
  constexpr int kMostClip = 2;
  constexpr float kClipStep = 0.005f;
  // Added to a float of up to 2^22 and subtracted, it rounds to an integer, ties to even.
  constexpr float kRounding = 0x1.8p23f;
  const auto [low, high] = std::minmax_element(w.begin(), w.end());
  Coded best;
  if (*low == *high) {
    best.offset = *low;
    best.error = 0.0f;
    return best;
  }
  for (int clip = kLeastClip; clip <= kMostClip; ++clip) {
    Coded coded;
    coded.scale = stored((*high - *low) / 255.0f * (1.0f - kClipStep * static_cast<float>(clip)));
    coded.offset = stored(0.5f * (*low + *high + coded.scale));
    for (int pass = 0; pass < 2 && coded.scale > 0.0f; ++pass) {
      const float inverse = 1.0f / coded.scale;
      for (std::size_t i = 0; i < kGroup; ++i) {
        const float code = (w[i] - coded.offset) * inverse;
        const float clamped = code < -128.0f ? -128.0f : code > 127.0f ? 127.0f : code;
        coded.values[i] = (clamped + kRounding) - kRounding;
      }
      fit_line(w, coded);
      keep_better(w, coded, best);
    }
  }
  return best;
}

bool is_finite(const Weights& w) {
  return std::all_of(w.begin(), w.end(), [](float x) { return std::isfinite(x); });
}

// The best code, or NaN.
[[gnu::always_inline]] inline Coded best_code(const Weights& w, WeightCode code) {
  Coded coded;
  if (is_finite(w)) coded = code == WeightCode::int8 ? best_line(w) : best_levels(w);
  if (!std::isfinite(coded.error)) {
    coded = {};
    coded.scale = std::numeric_limits<float>::quiet_NaN();
  }
  return coded;
}

// The search takes nearly all of the coding time, so it is compiled for two instruction sets.
// Without fused multiplications both find the same codes.
Coded find_code(const Weights& w, WeightCode code) { return best_code(w, code); }
#if defined(__x86_64__)
[[gnu::target("avx2")]] Coded find_code_avx2(const Weights& w, WeightCode code) {
  return best_code(w, code);
}
#endif

using FindCode = Coded (*)(const Weights&, WeightCode);
FindCode code_finder() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) return find_code_avx2;
#endif
  return find_code;
}

// The code of each level, at index level + 128.
constexpr std::array<std::uint8_t, 256> level_codes() {
  std::array<std::uint8_t, 256> codes = {};
  for (std::size_t i = 0; i < kWeightLevels.size(); ++i) {
    codes[static_cast<std::size_t>(kWeightLevels[i] + 128)] = static_cast<std::uint8_t>(i);
  }
  return codes;
}

void put_half(std::byte* to, std::size_t index, float value) {
  const std::uint16_t half = float_to_f16(value);
  std::memcpy(to + index * sizeof half, &half, sizeof half);
}

float half_at(const std::byte* from, std::size_t index) {
  std::uint16_t half = 0;
  std::memcpy(&half, from + index * sizeof half, sizeof half);
  return f16_to_float(half);
}

// A group with the best codes, as the row stores them.
CodedGroup group_of(const Coded& coded, WeightCode code) {
  constexpr std::array<std::uint8_t, 256> kCodes = level_codes();
  CodedGroup group = {code, {}, coded.scale, coded.offset};
  for (std::size_t i = 0; i < kGroup; ++i) {
    group.codes[i] = code == WeightCode::int8
                         ? static_cast<std::uint8_t>(static_cast<int>(coded.values[i]))
                         : kCodes[static_cast<std::size_t>(coded.values[i] + 128.0f)];
  }
  return group;
}

// The codes of a group in int8, which has the levels of int4 among its numbers.
std::array<std::uint8_t, kGroup> int8_codes(const CodedGroup& group) {
  std::array<std::uint8_t, kGroup> codes = group.codes;
  if (group.code == WeightCode::int4) {
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(kWeightLevels[code]);
  }
  return codes;
}

void read_row(const std::byte* row, DType dtype, std::int64_t inputs, float* to) {
  const auto count = static_cast<std::size_t>(inputs);
  if (dtype == DType::f32) {
    std::memcpy(to, row, count * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t half = 0;
    std::memcpy(&half, row + i * sizeof half, sizeof half);
    to[i] = dtype == DType::bf16 ? bf16_to_float(half) : f16_to_float(half);
  }
}

}  // namespace

std::string_view to_string(WeightCode code) {
  switch (code) {
    case WeightCode::elements:
      return "elements";
    case WeightCode::int8:
      return "int8";
    case WeightCode::int4:
      return "int4";
    case WeightCode::uint4:
      return "uint4";
  }
  return "unknown";
}

std::string to_string(const WeightFormat& format) {
  return std::string(format.is_coded() ? to_string(format.code) : to_string(format.element));
}

CodedRow::CodedRow(const WeightFormat& format, std::int64_t inputs)
    : groups(static_cast<std::size_t>(inputs / kWeightGroup)),
      offsets(groups * sizeof(std::uint16_t)),
      codes(offsets * (format.has_offsets() ? 2 : 1)) {
  check(format.is_coded() && format.fits(inputs), "weights: not a coded row");
}

WeightRows encode_rows(const WeightRows& rows, const WeightFormat& to, float* scratch) {
  check(!rows.format.is_coded(), "weights: coded already");
  check(to.code == WeightCode::int8 || to.code == WeightCode::int4, "weights: a code of files");
  const CodedRow at(to, rows.inputs);
  const std::size_t from_bytes = rows.format.row_bytes(rows.inputs);
  const std::size_t to_bytes = to.row_bytes(rows.inputs);
  auto* const data = static_cast<std::byte*>(rows.data);
  const FindCode find = code_finder();
  for (std::size_t r = 0; r < static_cast<std::size_t>(rows.rows); ++r) {
    read_row(data + r * from_bytes, rows.format.element, rows.inputs, scratch);
    std::byte* const coded = data + r * to_bytes;
    for (std::size_t group = 0; group < at.groups; ++group) {
      Weights w;
      std::copy_n(scratch + group * kGroup, kGroup, w.begin());
      put_group(group_of(find(w, to.code), to.code), group, to, at, coded);
    }
  }
  return {data, to, rows.rows, rows.inputs};
}

void put_group(const CodedGroup& group, std::size_t index, const WeightFormat& format,
               const CodedRow& at, std::byte* row) {
  check(group.code == format.code || format.code == WeightCode::int8, "weights: another code");
  put_half(row, index, group.scale);
  if (format.has_offsets()) put_half(row + at.offsets, index, group.offset);
  if (format.code == WeightCode::int8) {
    std::memcpy(row + at.codes + index * kGroup, int8_codes(group).data(), kGroup);
    return;
  }
  std::byte* const codes = row + at.codes + index * kGroup / 2;
  for (std::size_t i = 0; i < kGroup / 2; ++i) {
    codes[i] = static_cast<std::byte>(group.codes[2 * i] | group.codes[2 * i + 1] << 4);
  }
}

void decode_row(const std::byte* row, const WeightFormat& format, std::int64_t inputs, float* to) {
  const CodedRow at(format, inputs);
  const std::array<std::int8_t, 16> values = four_bit_values(format.code);
  for (std::size_t i = 0; i < static_cast<std::size_t>(inputs); ++i) {
    const float scale = half_at(row, i / kGroup);
    const float offset = format.has_offsets() ? half_at(row + at.offsets, i / kGroup) : 0.0f;
    std::int8_t code = 0;
    if (format.code == WeightCode::int8) {
      code = static_cast<std::int8_t>(row[at.codes + i]);
    } else {
      code = values[std::to_integer<unsigned>(row[at.codes + i / 2]) >> 4 * (i % 2) & 15u];
    }
    to[i] = scale * static_cast<float>(code) + offset;
  }
}

}  // namespace sluice
