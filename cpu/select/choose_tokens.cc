#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/runtime/cut.h"
#include "cpu/select/select.h"
#include "lib/check.h"

namespace sluice::cpu {
namespace {

// Number of `weights` that the cut keeps.
std::int64_t kept_by(Cut cut, std::span<const float> weights) {
  const auto above = std::count_if(weights.begin(), weights.end(),
                                   [&](float weight) { return weight > cut.weight; });
  const auto equal = std::count(weights.begin(), weights.end(), cut.weight);
  return above + std::min<std::int64_t>(equal, cut.ties);
}

std::int64_t count_of(const ChooseTokensParams& p, std::span<const float> sums) {
  if (p.tau >= 1.0) return static_cast<std::int64_t>(sums.size());
  const double total = std::accumulate(sums.begin(), sums.end(), 0.0);
  return kept_by(cut_by_weight(sums, p.tau * total), sums);
}

// Mean sum of each token over the probes that see it.
std::vector<float> means_of(const ChooseTokensParams& p, std::span<const float> sums) {
  std::vector<float> means(sums.begin(), sums.end());
  auto probe = p.probes.begin();
  for (std::size_t t = 0; t < means.size(); ++t) {
    while (*probe < p.first + static_cast<std::int64_t>(t)) ++probe;
    means[t] /= static_cast<float>(p.probes.end() - probe);
  }
  return means;
}

void mark_important(const ChooseTokensParams& p, std::span<const float> sums) {
  const std::vector<float> means = means_of(p, sums);
  Cut cut = cut_by_count(means, count_of(p, sums));
  std::uint8_t* const important = p.listed + p.first;
  for (std::size_t t = 0; t < means.size(); ++t) {
    const bool is_kept = means[t] > cut.weight || (means[t] == cut.weight && cut.ties-- > 0);
    important[t] = is_kept ? 1 : 0;
  }
  std::fill(p.listed + std::max(p.first, p.end - ChooseTokensParams::kNewest), p.listed + p.end,
            std::uint8_t{1});
}

// Lists the marked tokens.
void list(const ChooseTokensParams& p) {
  std::int32_t count = 0;
  std::int32_t before = 0;  // tokens listed before the block
  for (std::int64_t t = 0; t < p.end; ++t) {
    if (t == p.first || t % ChooseTokensParams::kBlock == 0) before = count;
    if (t >= p.first) p.seen[t - p.first] = before;
    if (p.listed[t] != 0) p.positions[count++] = static_cast<std::int32_t>(t);
  }
}

}  // namespace

void choose_tokens(const ChooseTokensParams& p) {
  check(!p.probes.empty() && p.probes.back() == p.end - 1, "choose_tokens: a token without probes");
  const std::span<const float> sums(p.sums + p.first, p.sums + p.end);
  const bool finite =
      std::all_of(sums.begin(), sums.end(), [](float sum) { return std::isfinite(sum); });
  *p.bad = finite ? 0 : 1;
  if (!finite) return;
  std::fill_n(p.listed, p.first, std::uint8_t{1});
  mark_important(p, sums);
  list(p);
}

}  // namespace sluice::cpu
