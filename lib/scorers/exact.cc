// The keys themselves: the oracle that the others approach.
#include "lib/scorers/estimate.h"
#include "lib/scorers/own.h"

namespace sluice::scorers {
namespace {

class Exact : public Scorer {
 public:
  Exact() : Scorer({"exact", ScorerInfo::Kind::logits}) {}
  bool runs_on(Processor /*processor*/) const override { return true; }
  bool by_backend() const override { return true; }
  bool reads_rows() const override { return true; }
  void score(const RunScorer& call) const override { estimate(call, Selector::exact); }
  std::uint64_t bytes_read(const ScorerUse& /*use*/, const ScanExtent& /*extent*/) const override {
    return 0;
  }
};

}  // namespace

std::shared_ptr<const Scorer> make_exact() { return std::make_shared<Exact>(); }

}  // namespace sluice::scorers
