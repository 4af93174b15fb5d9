#include "sluice/scorer_library.h"

#include <dlfcn.h>

#include <exception>
#include <string>
#include <utility>

#include "sluice/errors.h"

namespace sluice {
namespace {

constexpr const char* kEntry = "sluice_scorer";

// The layouts of kScorerVersion, of 64-bit machines.
static_assert(kScorerVersion == 3 && sizeof(ScorerInfo) == 64 && sizeof(ScorerUse) == 88 &&
                  sizeof(IndexNeeds) == 24 && sizeof(ScanExtent) == 16 &&
                  sizeof(BuildScorer) == 280 && sizeof(TruncateScorer) == 240 &&
                  sizeof(RunScorer) == 320 && sizeof(ObserveScorer) == 216 &&
                  sizeof(ScorerCount) == 24,
              "a changed layout needs a new kScorerVersion");

[[noreturn]] void refuse(ErrorCode code, const std::filesystem::path& path,
                         const std::string& why) {
  throw Error(code, path.string() + ": " + why);
}

std::string last_error() {
  const char* const text = ::dlerror();
  return text == nullptr ? "it cannot be loaded" : text;
}

// A path without a slash would be searched for among the system's libraries.
std::shared_ptr<void> open(const std::filesystem::path& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    refuse(ErrorCode::not_found, path, "there is no such file; give a scorer's shared library");
  }
  void* const library = ::dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) refuse(ErrorCode::corrupt, path, last_error());
  return {library, [](void* opened) { ::dlclose(opened); }};
}

}  // namespace

std::shared_ptr<const Scorer> load_scorer(const std::filesystem::path& path) {
  const std::shared_ptr<void> library = open(path);
  const auto* const entry = static_cast<const ScorerLibrary*>(::dlsym(library.get(), kEntry));
  if (entry == nullptr) {
    refuse(ErrorCode::corrupt, path,
           "exports no '" + std::string(kEntry) + "'; sluice/scorer_library.h says how");
  }
  if (entry->version != kScorerVersion) {
    refuse(ErrorCode::unsupported, path,
           "was built for version " + std::to_string(entry->version) +
               " of scorers, and this program has version " + std::to_string(kScorerVersion) +
               "; build it again with this program's headers");
  }
  std::shared_ptr<const Scorer> scorer;
  try {
    if (entry->make != nullptr) scorer = entry->make();
  } catch (const std::exception& error) {
    refuse(ErrorCode::unsupported, path, std::string("its scorer was not made: ") + error.what());
  }
  if (scorer == nullptr) refuse(ErrorCode::unsupported, path, "makes no scorer");
  // The library is released after the scorer, because the scorer's destructor is in it.
  const Scorer* const made = scorer.get();
  auto owner = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<const Scorer>>>(
      library, std::move(scorer));
  return {std::move(owner), made};
}

}  // namespace sluice
