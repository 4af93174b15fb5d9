// A custom scorer, which Sluice does not have: it keeps one bit per key channel, set if the key is
// above the mean of its page, and per page and channel the weight of a bit (size).
//
//   logit = (sum q_c mean_c + sum q_c sign_tc size_c) / sqrt(head_dim)
//
// mean_c is the mean of channel c over the page's 128 tokens. size_c is the mean distance from it,
// the best single number for the bit's weight. A page takes 3 KiB at head_dim 128, 4-bit tiles take
// 8.5 KiB.
#pragma once

#include <sluice/scorer.h>

namespace signs {

// The memory of a page of one KV head: f32 mean [head_dim], f32 size [head_dim], then for every
// token one sign bit per channel, from the lowest bit of the first word up; 1: above the mean.
struct PageLayout {
  int head_dim = 0;

  constexpr int words() const { return (head_dim + 31) / 32; }  // per token
  constexpr std::size_t bytes() const {
    return 2 * sizeof(float) * static_cast<std::size_t>(head_dim) +
           sluice::kPageTokens * sizeof(std::uint32_t) * static_cast<std::size_t>(words());
  }
};

// The parts of a page that is written (float, std::uint32_t) or read (the same, const); `floats`
// and `bits` point to the same address.
template <typename Float, typename Bits>
struct PageParts {
  Float* mean;
  Float* size;
  Bits* signs;  // [kPageTokens, words]

  constexpr PageParts(const PageLayout& layout, Float* floats, Bits* bits)
      : mean(floats), size(floats + layout.head_dim), signs(bits + 2 * layout.head_dim) {}
};
using Page = PageParts<float, std::uint32_t>;
using ReadPage = PageParts<const float, const std::uint32_t>;

class Signs : public sluice::Scorer {
 public:
  Signs() : Scorer({"signs", sluice::ScorerInfo::Kind::logits}) {}

  bool runs_on(sluice::Processor processor) const override;
  sluice::IndexNeeds needs(const sluice::ScorerUse& use) const override;
  void build(const sluice::BuildScorer& call) const override;
  void score(const sluice::RunScorer& call) const override;
  std::uint64_t bytes_read(const sluice::ScorerUse& use,
                           const sluice::ScanExtent& extent) const override;
};

// The same on a GPU (signs.cu), issued to the call's stream.
void build_on_gpu(const sluice::BuildScorer& call);
void score_on_gpu(const sluice::RunScorer& call);

}  // namespace signs
