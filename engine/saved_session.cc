#include "engine/saved_session.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

#include "engine/json_object.h"
#include "io/checksum.h"
#include "io/json.h"
#include "lib/bytes.h"
#include "lib/check.h"
#include "lib/process_limits.h"
#include "sluice/errors.h"
#include "sluice/version.h"

namespace sluice {
namespace {

static_assert(std::endian::native == std::endian::little, "words and rows are little-endian");

constexpr std::uint64_t kVersion1 = 1;
constexpr std::uint64_t kMagic = 0x53534543'49554c53;  // "SLUICESS"
constexpr std::string_view kFormat = "sluice session";
constexpr const char* kRemedy = "it is damaged; save the session again";

// Words of the rows file, before its sections.
namespace word {
enum Place : std::size_t {
  magic,
  version,
  id,
  layers,
  kv_heads,
  head_dim,
  row_bytes,
  tokens,
  uncorrected,
  sections,
};
}  // namespace word
constexpr std::size_t kWords = word::sections + 1;
constexpr std::size_t kSectionWords = 3;
constexpr std::uint64_t kMostSections = 64;

// Kinds of sections. The first kNeeded must be there.
namespace part {
enum Kind : std::uint64_t { tokens = 1, note = 2, rows = 3, sums = 4, index = 5, sectors = 6 };
}  // namespace part
constexpr std::size_t kNeeded = 4;
constexpr std::size_t kKinds = 6;

// Sums before those of pieces.
namespace sum_of {
enum Place : std::size_t { words, tokens, note };
}  // namespace sum_of
constexpr std::size_t kHeadSums = sum_of::note + 1;

// Rows begin here at the earliest, so that they can be read without the page cache one day.
constexpr std::uint64_t kAlignment = 4096;

std::string hex(std::uint64_t value) {
  std::array<char, 17> digits{};
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(value));
  return digits.data();
}

template <typename T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

std::uint64_t count(std::int64_t value) { return static_cast<std::uint64_t>(value); }

std::string layout_text(std::int64_t layers, std::int64_t kv_heads, std::int64_t head_dim) {
  return std::to_string(layers) + " layers of " + std::to_string(kv_heads) +
         " KV heads with head_dim " + std::to_string(head_dim);
}

std::string format_of(const KvShape& shape) { return to_string(shape.rows); }

// A manifest whose types are checked, but not its values.
struct Manifest {
  std::int64_t version = 0;
  std::string model;
  std::int64_t layers = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::string rows;
  std::int64_t row_bytes = 0;
  std::int64_t tokens = 0;
  std::string file;
  std::int64_t bytes = 0;
  std::string sums;
};

Manifest read_manifest(const SavedDirectory& directory) {
  const std::filesystem::path path = directory.manifest_path();
  const nlohmann::json json = parse_json(directory.read_manifest(), path, kRemedy);
  const auto format = json.is_object() ? json.find("format") : json.end();
  if (format == json.end() || *format != nlohmann::json(kFormat)) {
    throw Error(ErrorCode::corrupt,
                path.string() + ": is not the manifest of a saved session; check the path");
  }
  const JsonObject object(json, path, {}, kRemedy);
  const auto number = [&](const char* key) {
    return object.integer(key, 0, std::int64_t{1} << 62);
  };
  Manifest m;
  m.version = number("version");
  if (m.version != static_cast<std::int64_t>(kVersion1)) {
    throw Error(ErrorCode::unsupported, path.string() + ": the session has format version " +
                                            std::to_string(m.version) + "; sluice " + kVersion +
                                            " reads version 1");
  }
  m.model = object.string("model");
  m.layers = number("layers");
  m.kv_heads = number("kv_heads");
  m.head_dim = number("head_dim");
  m.rows = object.string("rows");
  m.row_bytes = number("row_bytes");
  m.tokens = number("tokens");
  m.file = object.string("file");
  m.bytes = number("bytes");
  m.sums = object.string("sums");
  return m;
}

std::string manifest_text(const SavedKind& kind, std::int64_t tokens, const DataFile& file,
                          std::uint64_t sums) {
  const KvShape& shape = kind.shape;
  const nlohmann::json json = {{"format", kFormat},
                               {"version", kVersion1},
                               {"written_by", std::string("sluice ") + kVersion},
                               {"model", hex(kind.model)},
                               {"layers", shape.layers},
                               {"kv_heads", shape.kv_heads},
                               {"head_dim", shape.head_dim},
                               {"rows", format_of(shape)},
                               {"row_bytes", shape.row_bytes()},
                               {"tokens", tokens},
                               {"file", file.name()},
                               {"bytes", file.written()},
                               {"sums", hex(sums)}};
  return json.dump(2) + "\n";
}

void require_model(const Manifest& manifest, const SavedKind& kind,
                   const std::filesystem::path& path) {
  if (manifest.model == hex(kind.model)) return;
  throw Error(ErrorCode::usage, path.string() +
                                    ": has a session of another model, or of other weights; "
                                    "choose the directory of a session of this one");
}

void require_layout(const Manifest& manifest, const SavedKind& kind,
                    const std::filesystem::path& path) {
  const KvShape& shape = kind.shape;
  const std::string saved = layout_text(manifest.layers, manifest.kv_heads, manifest.head_dim);
  const std::string own = layout_text(shape.layers, shape.kv_heads, shape.head_dim);
  if (saved != own) {
    throw Error(ErrorCode::corrupt,
                path.string() + ": says " + saved + ", and the model has " + own + "; " + kRemedy);
  }
  if (manifest.rows != format_of(shape)) {
    throw Error(ErrorCode::usage, path.string() + ": the session has rows of '" + manifest.rows +
                                      "', and this engine keeps " + format_of(shape) +
                                      "; set `kv_dtype` to what was saved");
  }
  if (count(manifest.row_bytes) != shape.row_bytes()) {
    throw Error(ErrorCode::unsupported, path.string() + ": the session has rows of " +
                                            std::to_string(manifest.row_bytes) +
                                            " bytes, and this version of sluice keeps " +
                                            std::to_string(shape.row_bytes()));
  }
}

// Throws unless a session of this kind may take the place of what the directory holds.
void require_replaceable(const SavedDirectory& directory, const SavedKind& kind) {
  if (!directory.has_manifest()) return;
  require_model(read_manifest(directory), kind, directory.manifest_path());
}

SavedDirectory open_to_save(const std::filesystem::path& path, const SavedKind& kind) {
  SavedDirectory directory = SavedDirectory::open_to_save(path);
  require_replaceable(directory, kind);
  return directory;
}

SavedLayout layout_of(const SavedKind& kind, const SavedHead& head, std::uint64_t index_bytes) {
  if (head.note.size() > SessionWriter::kMaxNoteBytes) {
    throw Error(ErrorCode::usage, "the note of a saved session has " +
                                      format_bytes(head.note.size()) + "; it may have " +
                                      format_bytes(SessionWriter::kMaxNoteBytes));
  }
  return {kind.shape, std::ssize(head.tokens), head.note.size(), index_bytes};
}

std::vector<std::uint64_t> words_of(const SavedKind& kind, const SavedLayout& layout,
                                    std::uint64_t id, const SavedHead& head) {
  std::vector<std::uint64_t> words(kWords);
  words[word::magic] = kMagic;
  words[word::version] = kVersion1;
  words[word::id] = id;
  words[word::layers] = count(kind.shape.layers);
  words[word::kv_heads] = count(kind.shape.kv_heads);
  words[word::head_dim] = count(kind.shape.head_dim);
  words[word::row_bytes] = kind.shape.row_bytes();
  words[word::tokens] = head.tokens.size();
  words[word::uncorrected] = count(head.uncorrected);
  words[word::sections] = layout.sections().size();
  for (const SavedLayout::Section& section : layout.sections()) {
    words.insert(words.end(), {section.kind, section.offset, section.bytes});
  }
  return words;
}

}  // namespace

SavedLayout::SavedLayout(const KvShape& shape, std::int64_t tokens, std::uint64_t note_bytes,
                         std::uint64_t index_bytes)
    : shape_(shape), tokens_(tokens) {
  const std::uint64_t pieces = count(pages()) * count(shape.layers);
  const std::size_t kinds = kNeeded + (index_bytes > 0 ? 1 : 0) + (sectors() > 0 ? 1 : 0);
  std::uint64_t at = (kWords + kinds * kSectionWords) * sizeof(std::uint64_t);
  const auto add = [&](part::Kind kind, std::uint64_t bytes, std::uint64_t alignment) {
    at = (at + alignment - 1) / alignment * alignment;
    sections_.push_back({kind, at, bytes});
    at += bytes;
  };
  add(part::tokens, count(tokens) * sizeof(TokenId), sizeof(std::uint64_t));
  add(part::note, note_bytes, sizeof(std::uint64_t));
  add(part::rows, count(tokens) * shape.token_bytes(), kAlignment);
  if (index_bytes > 0) add(part::index, index_bytes, sizeof(std::uint64_t));
  add(part::sums, (kHeadSums + pieces) * sizeof(std::uint64_t), sizeof(std::uint64_t));
  if (sectors() > 0) {
    add(part::sectors, (sectors() + 1) * sizeof(std::uint64_t), sizeof(std::uint64_t));
  }
}

SavedLayout::Section SavedLayout::section(std::uint64_t kind) const {
  for (const Section& section : sections_) {
    if (section.kind == kind) return section;
  }
  return {kind, 0, 0};
}

std::uint64_t SavedLayout::sectors() const {
  const std::uint64_t page_bytes = kPageTokens * shape_.row_bytes();
  if (page_bytes % kSectorBytes != 0) return 0;
  return count(tokens_ / kPageTokens) * kPageTokens * shape_.token_bytes() / kSectorBytes;
}

std::int64_t SavedLayout::page_tokens(std::int64_t page) const {
  return std::min<std::int64_t>(kPageTokens, tokens_ - page * kPageTokens);
}

std::uint64_t SavedLayout::piece_bytes(std::int64_t page) const {
  return count(page_tokens(page)) * count(shape_.kv_heads) * shape_.row_bytes();
}

std::uint64_t SavedLayout::piece_offset(std::int64_t page, int layer) const {
  return count(page) * kPageTokens * shape_.token_bytes() + count(layer) * piece_bytes(page);
}

SessionWriter::SessionWriter(const std::filesystem::path& directory, const SavedKind& kind,
                             const SavedHead& head, std::uint64_t index_bytes)
    : directory_(open_to_save(directory, kind)),
      kind_(kind),
      tokens_(std::ssize(head.tokens)),
      layout_(layout_of(kind, head, index_bytes)),
      file_(directory_, layout_.file_bytes()),
      index_sum_(file_.id()) {
  write_words(head);
}

void SessionWriter::pad_to(std::uint64_t offset) {
  const std::vector<std::byte> zeros(static_cast<std::size_t>(offset - file_.written()));
  file_.write(zeros);
}

void SessionWriter::write_words(const SavedHead& head) {
  const auto put = [&](std::span<const std::byte> bytes) {
    file_.write(bytes);
    sums_.push_back(checksum_of(bytes));
  };
  put(bytes_of(words_of(kind_, layout_, file_.id(), head)));
  pad_to(layout_.section(part::tokens).offset);
  put(bytes_of(head.tokens));
  pad_to(layout_.section(part::note).offset);
  put(std::as_bytes(std::span(head.note)));
  pad_to(layout_.section(part::rows).offset);
}

void SessionWriter::write(std::span<const RowSpan> heads) {
  Checksum sum(file_.id() + sums_.size() - kHeadSums);
  for (const RowSpan& head : heads) {
    const std::span<const std::byte> bytes(
        head.rows, static_cast<std::size_t>(head.count) * kind_.shape.row_bytes());
    sum.add(bytes);
    file_.write(bytes);
    const bool is_whole = head.count == kPageTokens && layout_.sectors() > 0;
    for (std::size_t at = 0; is_whole && at < bytes.size(); at += kSectorBytes) {
      sector_sums_.push_back(
          SavedSums::sum(file_.id(), sector_sums_.size(), bytes.subspan(at).first<kSectorBytes>()));
    }
  }
  sums_.push_back(sum.value());
}

void SessionWriter::write_index(std::span<const std::byte> bytes) {
  const SavedLayout::Section index = layout_.section(part::index);
  if (file_.written() < index.offset) pad_to(index.offset);
  index_sum_.add(bytes);
  file_.write(bytes);
  const std::uint64_t sum = index_sum_.value();
  if (file_.written() + sizeof sum == index.offset + index.bytes) {
    file_.write(std::as_bytes(std::span(&sum, 1)));
  }
}

void SessionWriter::commit() {
  const SavedLayout::Section sums = layout_.section(part::sums);
  check(sums_.size() * sizeof(std::uint64_t) == sums.bytes, "a saved session without all rows");
  check(sector_sums_.size() == layout_.sectors(), "a saved session without all sums of sectors");
  pad_to(sums.offset);
  file_.write(bytes_of(sums_));
  if (layout_.sectors() > 0) {
    sector_sums_.push_back(checksum_of(bytes_of(sector_sums_), file_.id() + 1));
    file_.write(bytes_of(sector_sums_));
  }
  check(file_.written() == layout_.file_bytes(), "a saved session of another size than planned");
  file_.commit(manifest_text(kind_, tokens_, file_, checksum_of(bytes_of(sums_))));
}

void SessionWriter::require_savable(const std::filesystem::path& directory, const SavedKind& kind,
                                    std::int64_t tokens) {
  open_to_save(directory, kind).require_room(SavedLayout(kind.shape, tokens, 0).file_bytes());
}

SessionReader::SessionReader(const std::filesystem::path& directory, const SavedKind& kind)
    : directory_(SavedDirectory::open_to_load(directory)), kind_(kind) {
  const Manifest manifest = read_manifest(directory_);
  const std::filesystem::path path = directory_.manifest_path();
  require_model(manifest, kind, path);
  require_layout(manifest, kind, path);
  data_name_ = manifest.file;
  file_.emplace(directory_.open_data(data_name_));
  if (count(manifest.bytes) != file_->size()) {
    refuse("has " + std::to_string(file_->size()) + " bytes, and its manifest says " +
           std::to_string(manifest.bytes));
  }
  // From here on sizes that follow from the tokens are no larger than the file.
  const std::uint64_t most = file_->size() / kind.shape.token_bytes();
  if (manifest.tokens < 1 || count(manifest.tokens) > most) {
    refuse("has no room for the " + std::to_string(manifest.tokens) +
           " tokens that its manifest says");
  }
  tokens_ = manifest.tokens;
  read_words(manifest.sums);
}

void SessionReader::refuse(const std::string& what) const {
  throw Error(ErrorCode::corrupt, file_->path().string() + ": " + what + "; " + kRemedy);
}

void SessionReader::read_words(const std::string& sums_sum) {
  std::vector<std::uint64_t> words(kWords);
  if (file_->size() < kWords * sizeof(std::uint64_t)) refuse("ends before its rows");
  file_->read(0, std::as_writable_bytes(std::span(words)));
  if (words[word::magic] != kMagic) refuse("is not a file of rows");
  if (words[word::version] != kVersion1) {
    throw Error(ErrorCode::unsupported, file_->path().string() + ": has format version " +
                                            std::to_string(words[word::version]) + "; sluice " +
                                            kVersion + " reads version 1");
  }
  const std::uint64_t sections = words[word::sections];
  const std::uint64_t head_bytes =
      (kWords + std::min(sections, kMostSections) * kSectionWords) * sizeof(std::uint64_t);
  if (sections > kMostSections || head_bytes > file_->size()) refuse("has a damaged beginning");
  words.resize(static_cast<std::size_t>(head_bytes) / sizeof(std::uint64_t));
  file_->read(0, std::as_writable_bytes(std::span(words)));

  found_.assign(kKinds, {});
  for (std::size_t at = kWords; at < words.size(); at += kSectionWords) {
    const SavedLayout::Section section = {words[at], words[at + 1], words[at + 2]};
    if (section.offset > file_->size() || section.bytes > file_->size() - section.offset) {
      refuse("has a section that goes beyond its end");
    }
    if (section.kind >= part::tokens && section.kind <= kKinds) found_[section.kind - 1] = section;
  }
  const std::uint64_t note_bytes = found_[part::note - 1].bytes;
  if (note_bytes > SessionWriter::kMaxNoteBytes) refuse("has a note that is too long");
  layout_.emplace(kind_.shape, tokens_, note_bytes, found_[part::index - 1].bytes);
  // The size of a file with holes costs nothing, so it does not limit what is allocated.
  require_memory(layout_->section(part::tokens).bytes + layout_->section(part::sums).bytes +
                     layout_->section(part::sectors).bytes,
                 Counted::all, "tokens and checksums of the saved session need",
                 "load it where there is more memory");
  for (std::size_t i = 0; i < kKinds; ++i) {
    const bool is_missing = found_[i].kind == 0 && i >= kNeeded;
    const bool is_whole =
        found_[i].kind == i + 1 && found_[i].bytes == layout_->section(i + 1).bytes;
    if (!is_missing && !is_whole) refuse("lacks a section, or has one of a wrong size");
  }
  read_sums(found_[part::sums - 1].offset, found_[part::sums - 1].bytes, sums_sum);
  read_head(words);
}

void SessionReader::read_sums(std::uint64_t offset, std::uint64_t bytes,
                              const std::string& expected) {
  sums_.resize(static_cast<std::size_t>(bytes) / sizeof(std::uint64_t));
  file_->read(offset, std::as_writable_bytes(std::span(sums_)));
  if (hex(checksum_of(bytes_of(sums_))) != expected)
    refuse("is not the one that its manifest names");
}

void SessionReader::read_head(std::span<const std::uint64_t> words) {
  const KvShape& shape = kind_.shape;
  if (checksum_of(std::as_bytes(words)) != sums_[sum_of::words]) refuse("has a damaged beginning");
  id_ = words[word::id];
  const bool agrees =
      words[word::tokens] == count(tokens_) && words[word::layers] == count(shape.layers) &&
      words[word::kv_heads] == count(shape.kv_heads) &&
      words[word::head_dim] == count(shape.head_dim) &&
      words[word::row_bytes] == shape.row_bytes() && words[word::uncorrected] <= count(tokens_);
  if (!agrees) refuse("contradicts its manifest");
  head_.uncorrected = static_cast<std::int64_t>(words[word::uncorrected]);
  head_.tokens.resize(static_cast<std::size_t>(tokens_));
  file_->read(found_[part::tokens - 1].offset, std::as_writable_bytes(std::span(head_.tokens)));
  head_.note.resize(static_cast<std::size_t>(found_[part::note - 1].bytes));
  file_->read(found_[part::note - 1].offset, std::as_writable_bytes(std::span(head_.note)));
  const bool is_intact = checksum_of(bytes_of(head_.tokens)) == sums_[sum_of::tokens] &&
                         checksum_of(std::as_bytes(std::span(head_.note))) == sums_[sum_of::note];
  if (!is_intact) refuse("has damaged tokens");
  for (const TokenId id : head_.tokens) {
    if (id < 0 || id >= kind_.vocabulary) refuse("has a token outside the model's vocabulary");
  }
}

void SessionReader::read(std::int64_t page, int layer, std::span<std::byte> to) const {
  const std::uint64_t number = count(page) * count(kind_.shape.layers) + count(layer);
  file_->read(found_[part::rows - 1].offset + layout_->piece_offset(page, layer), to);
  if (checksum_of(to, id_ + number) == sums_[static_cast<std::size_t>(kHeadSums + number)]) return;
  refuse("rows of layer " + std::to_string(layer) + " from token " +
         std::to_string(page * kPageTokens) + " on are damaged");
}

std::uint64_t SessionReader::rows_offset() const { return found_[part::rows - 1].offset; }

std::shared_ptr<SavedSums> SessionReader::sector_sums() const {
  const SavedLayout::Section section = found_[part::sectors - 1];
  if (section.bytes == 0 || rows_offset() % kSectorBytes != 0) return nullptr;
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(section.bytes) / sizeof(std::uint64_t));
  file_->read(section.offset, std::as_writable_bytes(std::span(sums)));
  const std::uint64_t expected = sums.back();
  sums.pop_back();
  if (checksum_of(bytes_of(sums), id_ + 1) != expected) refuse("has damaged checksums of sectors");
  return std::make_shared<SavedSums>(id_, std::move(sums));
}

SessionReader::Index::Index(const SessionReader& saved)
    : saved_(&saved),
      at_(saved.found_[part::index - 1].offset),
      left_(saved.found_[part::index - 1].bytes),
      sum_(saved.id_) {
  if (left_ > 0 && left_ < 2 * sizeof(std::uint64_t)) saved.refuse("has a damaged index");
  if (left_ > 0) left_ -= sizeof(std::uint64_t);  // its checksum
}

void SessionReader::Index::read(std::span<std::byte> to) {
  if (to.size() > left_) saved_->refuse("has an index of a wrong size");
  saved_->file_->read(at_, to);
  sum_.add(to);
  at_ += to.size();
  left_ -= to.size();
  if (left_ > 0) return;
  std::uint64_t expected = 0;
  saved_->file_->read(at_, std::as_writable_bytes(std::span(&expected, 1)));
  if (sum_.value() != expected) saved_->refuse("has a damaged index");
}

}  // namespace sluice
