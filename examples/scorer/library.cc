// The scorer as a shared library, for `sluice eval`, `bench` and `generate` with --scorer. From the
// installed headers:
//
//   c++ -std=c++20 -O3 -fPIC -shared -I PREFIX/include signs.cc library.cc -o signs.so
#include <sluice/scorer_library.h>

#include "signs.h"

extern "C" const sluice::ScorerLibrary sluice_scorer = {
    sluice::kScorerVersion,
    []() -> std::shared_ptr<const sluice::Scorer> { return std::make_shared<signs::Signs>(); }};
