// Quest (Tang et al. 2024): upper bounds from the extreme keys of sub-pages.
#include "lib/scorers/estimate.h"
#include "lib/scorers/own.h"

namespace sluice::scorers {
namespace {

class Quest : public Scorer {
 public:
  Quest() : Scorer({"quest", ScorerInfo::Kind::bounds}) {}
  bool runs_on(Processor /*processor*/) const override { return true; }
  bool by_backend() const override { return true; }
  IndexNeeds needs(const ScorerUse& /*use*/) const override { return {.bounds = true}; }
  void score(const RunScorer& call) const override { estimate(call, Selector::quest); }
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    return static_cast<std::uint64_t>(extent.pages * extent.passes) *
           PageBounds().page_bytes(use.shape.head_dim);
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_quest() { return std::make_shared<Quest>(); }

}  // namespace sluice::scorers
