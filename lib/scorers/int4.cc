// Every channel of the key tiles: Twilight's estimate (Lin et al. 2025).
#include "lib/scorers/estimate.h"
#include "lib/scorers/own.h"

namespace sluice::scorers {
namespace {

class Int4 : public Scorer {
 public:
  Int4() : Scorer({"int4", ScorerInfo::Kind::logits}) {}
  bool runs_on(Processor /*processor*/) const override { return true; }
  bool by_backend() const override { return true; }
  bool digests() const override { return true; }
  IndexNeeds needs(const ScorerUse& /*use*/) const override { return {.tiles = true}; }
  void score(const RunScorer& call) const override { estimate(call, Selector::int4); }
  std::uint64_t bytes_read(const ScorerUse& use, const ScanExtent& extent) const override {
    return tile_bytes(use, extent, use.shape.head_dim);
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_int4() { return std::make_shared<Int4>(); }

}  // namespace sluice::scorers
