// A library that makes no scorer.
#include <sluice/scorer_library.h>

extern "C" const sluice::ScorerLibrary sluice_scorer = {
    sluice::kScorerVersion, []() -> std::shared_ptr<const sluice::Scorer> { return nullptr; }};
