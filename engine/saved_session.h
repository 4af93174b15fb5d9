// The files of a saved session (io/saved_directory.h), format version 1.
//
// manifest.json: format and version, the model's fingerprint, the layout of rows, the number of
// tokens, name and size of the rows file, and the checksum of its table of sums.
//
// The rows file: 64-bit little-endian words [magic, version, id, layers, kv_heads, head_dim,
// row_bytes, tokens, uncorrected, sections], then for each section [kind, offset, bytes]. Readers
// skip sections of unknown kinds. The sections of version 1; the last two are optional:
//
//   tokens  std::int32_t [tokens]
//   note    bytes that mean something to the caller alone
//   rows    [pages of 128 tokens][layers][kv_heads][tokens of the page][row_bytes]
//   sums    std::uint64_t [3 + pages * layers], XXH3-64 of: the words, tokens, note, and of each
//           (page, layer) piece of rows, which is seeded with id + number, so that no piece passes
//           for another
//   index   the key index and value tiles of whole tiles, which have two pages: the bytes of a
//           name, the name (KeyIndex::kind()) padded to 8 bytes, [layers][tiles]
//           [KeyIndex::tile_bytes()], by layer the sums of values, and XXH3-64 of all that, seeded
//           with id
//   sectors std::uint64_t by sector of 4 KiB of the rows' whole pages: SavedSums::sum() with id;
//           then XXH3-64 of these, seeded with id + 1
//
// Rows do not depend on the policy. Where rows lie on disk and the index is of the policy's kind,
// pages are attached: read from this file, and checked by sectors, when they are first wanted.
// Elsewhere all rows are read, and index and value tiles are built again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/checksum.h"
#include "io/file.h"
#include "io/saved_directory.h"
#include "io/sector_sums.h"
#include "lib/backend/index_ops.h"
#include "sluice/types.h"

namespace sluice {

// Properties that a saved session must share with the engine that loads it.
struct SavedKind {
  std::uint64_t model = 0;  // fingerprint_of()
  KvShape shape;
  int vocabulary = 0;
};

// Bytes of the rows of one page and layer, which pass through a buffer while they are loaded.
inline std::size_t saved_piece_bytes(const KvShape& shape) {
  return static_cast<std::size_t>(kPageTokens * shape.kv_heads) * shape.row_bytes();
}

// A session as it is saved, but for its rows.
struct SavedHead {
  std::vector<TokenId> tokens;
  std::int64_t uncorrected = 0;  // newest tokens that a policy has yet to correct
  std::string note;
};

// Offsets and sizes of the rows file, from numbers that were checked.
class SavedLayout {
 public:
  // `index_bytes`: 0 for none.
  SavedLayout(const KvShape& shape, std::int64_t tokens, std::uint64_t note_bytes,
              std::uint64_t index_bytes = 0);

  struct Section {
    std::uint64_t kind, offset, bytes;
  };
  // In the order of the file: tokens, note, rows, index, sums, sectors. Those
  // that it does not have are left out.
  std::span<const Section> sections() const { return sections_; }
  // By its kind; 0 bytes if there is none.
  Section section(std::uint64_t kind) const;
  std::uint64_t file_bytes() const { return sections_.back().offset + sections_.back().bytes; }
  std::uint64_t piece_bytes(std::int64_t page) const;
  // Bytes from the start of the rows to a piece.
  std::uint64_t piece_offset(std::int64_t page, int layer) const;
  std::int64_t pages() const { return (tokens_ + kPageTokens - 1) / kPageTokens; }
  std::int64_t page_tokens(std::int64_t page) const;
  // Sectors of whole pages; 0 if those are not of whole sectors.
  std::uint64_t sectors() const;

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
  // `index_bytes`: what write_index() will be given in all.
  SessionWriter(const std::filesystem::path& directory, const SavedKind& kind,
                const SavedHead& head, std::uint64_t index_bytes = 0);

  // The next piece: all layers of a page, then the next page. `heads`: its rows by KV head.
  void write(std::span<const RowSpan> heads);
  // The next part of the index, after the last piece.
  void write_index(std::span<const std::byte> bytes);
  // Call after the last piece and part. Until it returns, the directory has what it had before.
  void commit();

  // Throws what saving a session of `tokens` tokens would throw before it writes; creates the
  // directory.
  static void require_savable(const std::filesystem::path& directory, const SavedKind& kind,
                              std::int64_t tokens);

 private:
  void write_words(const SavedHead& head);
  void pad_to(std::uint64_t offset);

  SavedDirectory directory_;
  SavedKind kind_;
  std::int64_t tokens_;
  SavedLayout layout_;
  DataFile file_;
  std::vector<std::uint64_t> sums_;
  std::vector<std::uint64_t> sector_sums_;
  Checksum index_sum_;
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

  // Sums of the sectors of whole pages; null if there are none. Throws Error{corrupt}.
  std::shared_ptr<SavedSums> sector_sums() const;
  // The file and its first byte of rows, to read whole pages by those sums.
  File open_rows() const { return directory_.open_data(data_name_); }
  std::uint64_t rows_offset() const;
  // Reads the index from its start on, in parts of any size, and once all is
  // read checks it. Throws Error{corrupt}.
  class Index {
   public:
    explicit Index(const SessionReader& saved);
    std::uint64_t left() const { return left_; }  // bytes
    void read(std::span<std::byte> to);

   private:
    const SessionReader* saved_;
    std::uint64_t at_;
    std::uint64_t left_;
    Checksum sum_;
  };

 private:
  void read_words(const std::string& sums_sum);
  void read_sums(std::uint64_t offset, std::uint64_t bytes, const std::string& expected);
  void read_head(std::span<const std::uint64_t> words);
  [[noreturn]] void refuse(const std::string& what) const;

  SavedDirectory directory_;
  SavedKind kind_;
  std::optional<File> file_;
  std::string data_name_;
  std::int64_t tokens_ = 0;
  std::uint64_t id_ = 0;
  std::optional<SavedLayout> layout_;
  std::vector<SavedLayout::Section> found_;  // by kind - 1
  std::vector<std::uint64_t> sums_;
  SavedHead head_;
};

}  // namespace sluice
