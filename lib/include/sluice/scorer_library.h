// Scorers in shared libraries, which a program loads by path: `sluice bench --scorer FILE.so`. The
// library exports one object, by this name:
//
//   #include <sluice/scorer_library.h>
//
//   extern "C" const sluice::ScorerLibrary sluice_scorer = {
//       sluice::kScorerVersion, [] { return std::shared_ptr<sluice::Scorer>(new MyScorer()); }};
//
// and is compiled as a shared library, from the public headers alone:
//
//   c++ -std=c++20 -O3 -fPIC -shared my_scorer.cc -o my_scorer.so
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "sluice/scorer.h"

namespace sluice {

// Grows whenever something in sluice/scorer.h changes its layout, functions included.
inline constexpr std::int32_t kScorerVersion = 3;

struct ScorerLibrary {
  std::int32_t version = 0;  // kScorerVersion of the headers; the first member in all versions
  std::shared_ptr<const Scorer> (*make)() = nullptr;
};

// The scorer of a shared library, which stays loaded as long as the scorer lives. It is the user's
// code, and runs with the rights of this process. Throws Error{not_found} if there is no such file,
// Error{corrupt} if it cannot be loaded or exports no `sluice_scorer`, and Error{unsupported} if it
// was built for another version or makes no scorer.
std::shared_ptr<const Scorer> load_scorer(const std::filesystem::path& path);

}  // namespace sluice
