// Prefixes on disk, from one batcher to the next: a directory of saved sessions (Session::save()).
// Batchers name theirs `prefix-NUMBER`; sessions of other names are a user's, and never removed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

#include "engine/batch/prefix_cache.h"
#include "sluice/batcher.h"

namespace sluice::batch {

// Puts the newest of the directory's sessions, up to `most`, into the cache, as siblings of `root`.
// Stops where the memory has no room for one; others that do not load stay where they are. Creates
// the directory. Throws Error{usage} or Error{io} if it cannot be used.
SavedPrefixes load_prefixes(const std::filesystem::path& directory, const Engine& engine,
                            Session& root, std::span<const Policy> policies, std::size_t most,
                            PrefixCache& cache);

// Saves the cache's sessions of at least a page that the directory lacks, and removes the oldest of
// the batchers' own of this model beyond `most`.
SavedPrefixes save_prefixes(const std::filesystem::path& directory, const Engine& engine,
                            std::span<const Policy> policies, std::size_t most, PrefixCache& cache);

}  // namespace sluice::batch
