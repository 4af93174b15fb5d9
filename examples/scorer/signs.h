// A scorer of one's own, which Sluice does not have: of every key channel it keeps one bit, whether
// the key lies above or below the mean of its page, and what a bit is worth.
//
//   logit = (sum q_c mean_c + sum q_c sign_tc size_c) / sqrt(head_dim)
//
// with mean_c the mean of channel c over the page's 128 tokens and size_c the mean distance from
// it, the best one number for it. That is 3 KiB for a page at head_dim 128; tiles of 4 bits
// take 8.5.
#pragma once

#include <sluice/scorer.h>

namespace signs {

// What is kept of a page of one KV head: f32 mean [head_dim], f32 size [head_dim], then for every
// token the signs of its channels, a bit for each, from the lowest of the first word up; 1: above.
struct PageLayout {
  int head_dim = 0;

  constexpr int words() const { return (head_dim + 31) / 32; }  // of a token
  constexpr std::size_t bytes() const {
    return 2 * sizeof(float) * static_cast<std::size_t>(head_dim) +
           sluice::kPageTokens * sizeof(std::uint32_t) * static_cast<std::size_t>(words());
  }
};

// Its parts, from `floats` and `bits`, which are the same place.
struct Page {
  float* mean;
  float* size;
  std::uint32_t* signs;  // [kPageTokens, words]

  constexpr Page(const PageLayout& layout, float* floats, std::uint32_t* bits)
      : mean(floats), size(floats + layout.head_dim), signs(bits + 2 * layout.head_dim) {}
};

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

// The same on a GPU, signs.cu: issued to the call's stream.
void build_on_gpu(const sluice::BuildScorer& call);
void score_on_gpu(const sluice::RunScorer& call);

}  // namespace signs
