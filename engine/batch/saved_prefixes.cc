#include "engine/batch/saved_prefixes.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <list>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "io/checksum.h"
#include "io/saved_directory.h"
#include "lib/current_error.h"
#include "sluice/errors.h"

namespace sluice::batch {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kName = "prefix-";
// The note of a batcher's session: this and `dense`, or the policy of a sparse prefill, because the
// rows of a prompt depend on it.
constexpr std::string_view kNote = "prefix of a batcher, prefill=";
constexpr std::string_view kDense = "dense";

struct Entry {
  fs::path path;
  fs::file_time_type used;
};

// Directories in `directory`, newest first.
std::vector<Entry> entries_of(const fs::path& directory) {
  std::vector<Entry> entries;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    std::error_code unreadable;
    if (!entry.is_directory(unreadable) || unreadable) continue;
    const fs::file_time_type used = entry.last_write_time(unreadable);
    if (!unreadable) entries.push_back({entry.path(), used});
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.used != b.used ? a.used > b.used : a.path < b.path;
  });
  return entries;
}

void require_directory(const fs::path& directory) {
  std::error_code error;
  std::error_code unreadable;
  fs::create_directory(directory, error);
  if (fs::is_directory(directory, unreadable)) return;
  const bool is_file = fs::exists(directory, unreadable);
  throw Error(ErrorCode::io,
              directory.string() + (is_file ? ": is a file, not a directory for prefixes"
                                            : ": the directory for prefixes cannot be made" +
                                                  (error ? ": " + error.message() : "")));
}

// PageHashes::kind() of rows with this note; none: no policy has such rows.
std::optional<std::uint64_t> kind_of(std::string_view note, std::span<const Policy> policies) {
  if (!note.starts_with(kNote)) return 0;  // a user's own session
  const std::string_view prefill = note.substr(kNote.size());
  if (prefill == kDense) return 0;
  for (std::size_t i = 0; i < policies.size(); ++i) {
    if (to_string(policies[i]) == prefill) return i + 1;
  }
  return {};
}

fs::path name_of(const CachedPrefix& prefix, const std::string& note) {
  const std::span<const TokenId> tokens = prefix.tokens;
  const std::uint64_t number =
      checksum_of(std::as_bytes(tokens), checksum_of(std::as_bytes(std::span(note))));
  std::array<char, 16> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number, 16).ptr;
  return std::string(kName) + std::string(digits.data(), end);
}

// True for a session that a batcher of this model has saved.
bool is_own(const fs::path& path, const Engine& engine) {
  if (!path.filename().string().starts_with(kName)) return false;
  try {
    return engine.saved_session(path).note.starts_with(kNote);
  } catch (const Error&) {
    return false;
  }
}

// True if a prefix has less than a page that none of the others has.
bool adds_little(std::span<const TokenId> tokens, const PageHashes& pages,
                 const std::vector<CachedPrefix*>& others) {
  return std::any_of(others.begin(), others.end(), [&](const CachedPrefix* other) {
    return common_prefix(other->tokens, other->pages, tokens, pages) >
           std::ssize(tokens) - kPageTokens;
  });
}

// Returns true if `work` succeeds; otherwise the report says why. Throws only Error{memory}.
bool tried(SavedPrefixes& report, const auto& work) {
  try {
    work();
    return true;
  } catch (const std::exception&) {
    const Error error = current_error();
    if (error.code() == ErrorCode::memory) throw Error(error);
    report.skipped.emplace_back(error.what());
    return false;
  }
}

// The prefix that is saved there; none: it adds little to `others`, or is skipped, as the report
// says.
std::optional<CachedPrefix> loaded(const fs::path& path, const Engine& engine, Session& root,
                                   std::span<const Policy> policies,
                                   const std::vector<CachedPrefix*>& others,
                                   SavedPrefixes& report) {
  std::optional<CachedPrefix> prefix;
  tried(report, [&] {
    SavedSession saved = engine.saved_session(path);
    const std::optional<std::uint64_t> kind = kind_of(saved.note, policies);
    if (!kind) {
      throw Error(ErrorCode::usage, path.string() + ": its prompt was read as no policy here does");
    }
    PageHashes pages(saved.tokens, *kind);
    if (adds_little(saved.tokens, pages, others)) return;
    Session session = root.sibling();
    session.load(path);
    prefix.emplace(
        CachedPrefix{std::move(session), std::move(saved.tokens), std::move(pages), path});
  });
  return prefix;
}

// Saves a prefix, or marks one that is there as used.
void save_to(const fs::path& directory, const Engine& engine, std::span<const Policy> policies,
             CachedPrefix& prefix) {
  const std::uint64_t kind = prefix.pages.kind();
  const std::string note =
      std::string(kNote) + (kind == 0 ? std::string(kDense) : to_string(policies[kind - 1]));
  const bool is_there =
      !prefix.saved.empty() && directory / prefix.saved.filename() == prefix.saved;
  const fs::path path = is_there ? prefix.saved : directory / name_of(prefix, note);
  if (fs::exists(path / SavedDirectory::kManifest)) {
    static_cast<void>(engine.saved_session(path));  // throws for a damaged one
  } else {
    prefix.session.save(path, note);
  }
  prefix.saved = path;
  fs::last_write_time(path, fs::file_time_type::clock::now());
}

}  // namespace

SavedPrefixes load_prefixes(const fs::path& directory, const Engine& engine, Session& root,
                            std::span<const Policy> policies, std::size_t most,
                            PrefixCache& cache) {
  require_directory(directory);
  SavedPrefixes report;
  std::list<CachedPrefix> newest_first;
  std::vector<CachedPrefix*> all;
  for (const Entry& entry : entries_of(directory)) {
    if (all.size() == most) break;
    try {
      std::optional<CachedPrefix> prefix = loaded(entry.path, engine, root, policies, all, report);
      if (!prefix) continue;
      ++report.sessions;
      report.tokens += std::ssize(prefix->tokens);
      all.push_back(&newest_first.emplace_back(std::move(*prefix)));
    } catch (const Error&) {  // of memory: see tried()
      report.skipped.push_back(entry.path.string() + ": there is no room for it");
      break;
    }
  }
  std::for_each(newest_first.rbegin(), newest_first.rend(),
                [&](CachedPrefix& prefix) { cache.keep(std::move(prefix)); });
  return report;
}

SavedPrefixes save_prefixes(const fs::path& directory, const Engine& engine,
                            std::span<const Policy> policies, std::size_t most,
                            PrefixCache& cache) {
  require_directory(directory);
  SavedPrefixes report;
  std::vector<CachedPrefix*> newest_first;
  cache.for_each([&](CachedPrefix& prefix) {
    if (std::ssize(prefix.tokens) < kPageTokens) return;
    if (!adds_little(prefix.tokens, prefix.pages, newest_first)) newest_first.push_back(&prefix);
  });
  for (auto prefix = newest_first.rbegin(); prefix != newest_first.rend(); ++prefix) {
    const bool is_kept = tried(report, [&] { save_to(directory, engine, policies, **prefix); });
    if (!is_kept) continue;
    ++report.sessions;
    report.tokens += std::ssize((*prefix)->tokens);
  }
  std::size_t own = 0;
  for (const Entry& entry : entries_of(directory)) {
    if (!is_own(entry.path, engine) || ++own <= most) continue;
    tried(report, [&] { fs::remove_all(entry.path); });
  }
  return report;
}

}  // namespace sluice::batch
