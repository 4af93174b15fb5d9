#include "cpu/runtime/cut.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <limits>
#include <vector>

#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Bin of a weight: the upper bits of its representation, which order non-negative floats. Adding
// 0.0f turns -0 into +0.
std::size_t bin_of(float weight) { return std::bit_cast<std::uint32_t>(weight + 0.0f) >> 18; }

// Number of bins up to that of the heaviest weight.
std::size_t bins_of(std::span<const float> weights) {
  const auto heaviest = std::max_element(weights.begin(), weights.end());
  return heaviest == weights.end() || *heaviest < 0.0f ? 1 : bin_of(*heaviest) + 1;
}

// The weights of one bin, heaviest first.
std::vector<float> bin_content(std::span<const float> weights, std::size_t bin) {
  std::vector<float> content;
  for (const float w : weights) {
    if (w >= 0.0f && bin_of(w) == bin) content.push_back(w);
  }
  std::sort(content.begin(), content.end(), std::greater<>());
  return content;
}

// The cut through a bin's sorted content that keeps its first `count` weights.
Cut cut_after(const std::vector<float>& content, std::int64_t count) {
  check(count >= 1 && count <= static_cast<std::int64_t>(content.size()), "cut outside its bin");
  const float last = content[static_cast<std::size_t>(count - 1)];
  const auto first_equal = std::lower_bound(content.begin(), content.end(), last, std::greater<>());
  return {last, count - (first_equal - content.begin())};
}

constexpr Cut kEverything = {-1.0f, 0};
constexpr Cut kNothing = {std::numeric_limits<float>::infinity(), 0};

}  // namespace

Cut cut_by_count(std::span<const float> weights, std::int64_t count) {
  if (count <= 0) return kNothing;
  std::vector<std::int64_t> bins(bins_of(weights));
  std::int64_t available = 0;
  for (const float w : weights) {
    if (!(w >= 0.0f)) continue;
    ++bins[bin_of(w)];
    ++available;
  }
  if (count >= available) return kEverything;
  std::size_t bin = bins.size() - 1;
  std::int64_t above = 0;
  while (above + bins[bin] < count) above += bins[bin--];
  return cut_after(bin_content(weights, bin), count - above);
}

Cut cut_by_weight(std::span<const float> weights, double target) {
  if (target <= 0.0) return kNothing;
  std::vector<double> bins(bins_of(weights));
  double all = 0.0;
  for (const float w : weights) {
    if (!(w > 0.0f)) continue;
    bins[bin_of(w)] += static_cast<double>(w);
    all += static_cast<double>(w);
  }
  if (all < target) return kEverything;
  std::size_t bin = bins.size() - 1;
  double above = 0.0;
  while (bin > 0 && above + bins[bin] < target) above += bins[bin--];
  const std::vector<float> content = bin_content(weights, bin);
  // Summed from the heaviest, the weights may round to just below their sum in order, so even bin 0
  // may not reach `target`.
  if (content.empty() || content.front() == 0.0f) return kEverything;
  std::int64_t count = 0;
  while (above < target && count < static_cast<std::int64_t>(content.size())) {
    above += static_cast<double>(content[static_cast<std::size_t>(count++)]);
  }
  return cut_after(content, std::max<std::int64_t>(count, 1));
}

}  // namespace sluice::cpu
