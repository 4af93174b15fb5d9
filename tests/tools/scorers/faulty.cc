// A scorer that throws, in a call that its parameter names.
#include <sluice/scorer_library.h>

#include <limits>
#include <stdexcept>

namespace {

enum Fault { none, in_score, in_build, in_needs, no_exception, no_number };

class Faulty : public sluice::Scorer {
 public:
  Faulty()
      : Scorer({"faulty",
                sluice::ScorerInfo::Kind::logits,
                {{.name = "fault", .least = none, .most = no_number, .range = "0 to 5"}}}) {}

  sluice::IndexNeeds needs(const sluice::ScorerUse& use) const override {
    fail_if(use, in_needs);
    sluice::IndexNeeds needs;
    needs.page_bytes = 64;
    return needs;
  }
  void build(const sluice::BuildScorer& call) const override { fail_if(call.use, in_build); }

  void score(const sluice::RunScorer& call) const override {
    fail_if(call.use, in_score);
    if (is(call.use, no_exception)) throw 7;
    const float logit = is(call.use, no_number) ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    const int queries = call.use.shape.query_heads;
    for (std::int64_t i = 0; i < call.batch.count; ++i) {
      for (int query = 0; query < queries; ++query) {
        float* const logits = call.logits.row<float>(i * queries + query);
        for (std::int64_t t = 0; t < call.batch.tokens[i].page_first(); ++t) logits[t] = logit;
      }
    }
  }
  std::uint64_t bytes_read(const sluice::ScorerUse& /*use*/,
                           const sluice::ScanExtent& /*extent*/) const override {
    return 0;
  }

 private:
  static bool is(const sluice::ScorerUse& use, Fault fault) {
    return static_cast<int>(use.parameter("fault", none)) == fault;
  }
  static void fail_if(const sluice::ScorerUse& use, Fault fault) {
    if (is(use, fault)) throw std::runtime_error("the scorer's own reason");
  }
};

}  // namespace

extern "C" const sluice::ScorerLibrary sluice_scorer = {
    sluice::kScorerVersion,
    []() -> std::shared_ptr<const sluice::Scorer> { return std::make_shared<Faulty>(); }};
