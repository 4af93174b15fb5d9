// A scorer of another version, which must not be called.
#include <sluice/scorer_library.h>

extern "C" const sluice::ScorerLibrary sluice_scorer = {sluice::kScorerVersion - 1, nullptr};
