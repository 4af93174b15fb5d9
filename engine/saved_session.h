// The files of a saved session (io/saved_directory.h), format version 1.
//
// manifest.json: format and version, the model's fingerprint, the layout of rows, the number of
// tokens, name and size of the rows file, and the checksum of its table of sums.
//
// The rows file: 64-bit little-endian words [magic, version, id, layers, kv_heads, head_dim,
// row_bytes, tokens, uncorrected, sections], then for each section [kind, offset, bytes]. Readers
// skip sections of kinds that they do not know. The sections of version 1:
//
//   tokens  std::int32_t [tokens]
//   note    bytes that mean something to the caller alone
//   rows    [pages of 128 tokens][layers][kv_heads][tokens of the page][row_bytes]
//   sums    std::uint64_t [3 + pages * layers], XXH3-64 of: the words, tokens, note, and of each
//           (page, layer) piece of rows, which is seeded with id + number, so that no piece passes
//           for another
//
// Rows do not depend on the policy: an index and value tiles are rebuilt when rows are loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/saved_directory.h"
#include "lib/backend/index_ops.h"
#include "sluice/types.h"

namespace sluice {

// Properties that a saved session must share with the engine that loads it.
struct SavedKind {
  std::uint64_t model = 0;  // fingerprint_of()
  KvShape shape;
  int vocabulary = 0;
};

// A session as it is saved, but for its rows.
struct SavedHead {
  std::vector<TokenId> tokens;
  std::int64_t uncorrected = 0;  // newest tokens that a policy has yet to correct
  std::string note;
};

// Offsets and sizes of the rows file, from numbers that were checked.
class SavedLayout {
 public:
  SavedLayout(const KvShape& shape, std::int64_t tokens, std::uint64_t note_bytes);

  struct Section {
    std::uint64_t kind, offset, bytes;
  };
  // In the order of the file: tokens, note, rows, sums.
  std::span<const Section> sections() const { return sections_; }
  std::uint64_t file_bytes() const { return sections_.back().offset + sections_.back().bytes; }
  std::uint64_t piece_bytes(std::int64_t page) const;
  // Bytes from the start of the rows to a piece.
  std::uint64_t piece_offset(std::int64_t page, int layer) const;
  std::int64_t pages() const { return (tokens_ + kPageTokens - 1) / kPageTokens; }
  std::int64_t page_tokens(std::int64_t page) const;

 private:
  KvShape shape_;
  std::int64_t tokens_;
  std::vector<Section> sections_;
};

class SessionWriter {
 public:
  static constexpr std::uint64_t kMaxNoteBytes = std::uint64_t{64} << 20;

  // Writes all but the rows. Throws Error{usage} if the note is too long or the directory holds
  // something else, such as a session of another model, and what SavedDirectory and DataFile throw.
  SessionWriter(const std::filesystem::path& directory, const SavedKind& kind,
                const SavedHead& head);

  // The next piece: all layers of a page, then the next page. `heads`: its rows by KV head.
  void write(std::span<const RowSpan> heads);
  // Call after the last piece. Until it returns, the directory has what it had before.
  void commit();

  // Throws what saving a session of `tokens` tokens would throw before it writes; creates the
  // directory.
  static void require_savable(const std::filesystem::path& directory, const SavedKind& kind,
                              std::int64_t tokens);

 private:
  void write_words(const SavedHead& head);

  SavedDirectory directory_;
  SavedKind kind_;
  std::int64_t tokens_;
  SavedLayout layout_;
  DataFile file_;
  std::vector<std::uint64_t> sums_;
};

// Throws Error{not_found} without a saved session, Error{usage} for one of another model, layout or
// row format, Error{unsupported} for another version, Error{corrupt} for files that are damaged or
// do not belong together, Error{io} if the directory is being saved to.
class SessionReader {
 public:
  SessionReader(const std::filesystem::path& directory, const SavedKind& kind);

  const SavedHead& head() const { return head_; }
  const SavedLayout& layout() const { return *layout_; }
  // Reads and checks a piece; `to` has layout().piece_bytes(page).
  void read(std::int64_t page, int layer, std::span<std::byte> to) const;

 private:
  void read_words(const std::string& sums_sum);
  void read_sums(std::uint64_t offset, std::uint64_t bytes, const std::string& expected);
  void read_head(std::span<const std::uint64_t> words);
  [[noreturn]] void refuse(const std::string& what) const;

  SavedDirectory directory_;
  SavedKind kind_;
  std::optional<File> file_;
  std::int64_t tokens_ = 0;
  std::uint64_t id_ = 0;
  std::optional<SavedLayout> layout_;
  std::vector<SavedLayout::Section> found_;  // in the order of SavedLayout::sections()
  std::vector<std::uint64_t> sums_;
  SavedHead head_;
};

}  // namespace sluice
