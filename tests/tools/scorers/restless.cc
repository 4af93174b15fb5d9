// A scorer whose estimates depend on how often it was asked, so that no two runs select alike.
#include <sluice/scorer_library.h>

namespace {

class Restless : public sluice::Scorer {
 public:
  Restless() : Scorer({"restless", sluice::ScorerInfo::Kind::logits}) {}

  void score(const sluice::RunScorer& call) const override {
    static std::uint32_t state = 1;
    const int queries = call.use.shape.query_heads;
    for (std::int64_t i = 0; i < call.batch.count; ++i) {
      for (int query = 0; query < queries; ++query) {
        float* const logits = call.logits.row<float>(i * queries + query);
        for (std::int64_t t = 0; t < call.batch.tokens[i].page_first(); ++t) {
          state = state * 1664525 + 1013904223;
          logits[t] = static_cast<float>(state >> 16) * 1e-4f;
        }
      }
    }
  }
  std::uint64_t bytes_read(const sluice::ScorerUse& /*use*/,
                           const sluice::ScanExtent& /*extent*/) const override {
    return 0;
  }
};

}  // namespace

extern "C" const sluice::ScorerLibrary sluice_scorer = {
    sluice::kScorerVersion,
    []() -> std::shared_ptr<const sluice::Scorer> { return std::make_shared<Restless>(); }};
