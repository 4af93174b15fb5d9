// Sessions to and from disk: see Session::save() and Engine::load_session().
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine_impl.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The part of a key index that is saved: whole tiles, because a load can leave their pages in the
// file.
class IndexOfSession {
 public:
  explicit IndexOfSession(KvSession& kv) : kv_(&kv) {
    if (kv.pool()->sparse() == nullptr || kv.plan().ragged) return;
    index_ = &kv.pool()->sparse()->index();
    name_ = index_->kind();
    if (!name_.empty()) name_.resize((name_.size() + 7) / 8 * 8, ' ');
  }

  // Bytes of a session of `tokens` tokens, with its checksum; 0 if no index is saved.
  std::uint64_t bytes(std::int64_t tokens) const {
    const std::int64_t tiles = tiles_of(tokens);
    if (name_.empty() || tiles == 0) return 0;
    std::uint64_t bytes = 2 * sizeof(std::uint64_t) + name_.size();
    for (int layer = 0; layer < layers(); ++layer) {
      bytes += static_cast<std::uint64_t>(tiles) * index_->tile_bytes(layer) +
               index_->layer_sum_bytes(layer);
    }
    return bytes;
  }

  // True if the saved index may take the place of this one, or if none is needed. Reads its name.
  bool takes(SessionReader::Index& saved, std::int64_t tokens) const {
    if (kv_->pool()->sparse() == nullptr) return true;
    const std::uint64_t bytes = this->bytes(tokens);
    if (bytes == 0 || saved.left() != bytes - sizeof(std::uint64_t)) return false;
    std::uint64_t length = 0;
    saved.read(std::as_writable_bytes(std::span(&length, 1)));
    if (length != name_.size()) return false;
    std::string name(name_.size(), '\0');
    saved.read(std::as_writable_bytes(std::span(name)));
    return name == name_;
  }

  void save(SessionWriter& writer) {
    if (bytes(kv_->length()) == 0) return;
    const std::uint64_t length = name_.size();
    writer.write_index(std::as_bytes(std::span(&length, 1)));
    writer.write_index(std::as_bytes(std::span(name_)));
    for (int layer = 0; layer < layers(); ++layer) {
      std::vector<std::byte> tile(index_->tile_bytes(layer));
      for (std::int64_t i = 0; i < tiles_of(kv_->length()) && !tile.empty(); ++i) {
        kv_->pool()->save_tile(layer, kv_->sequence(), i, tile.data());
        kv_->pool()->queue().synchronize();
        writer.write_index(tile);
      }
    }
    for (int layer = 0; layer < layers(); ++layer) {
      std::vector<std::byte> sums(index_->layer_sum_bytes(layer));
      if (sums.empty()) continue;
      index_->save_sums(layer, kv_->sequence(), sums.data());
      kv_->pool()->queue().synchronize();
      writer.write_index(sums);
    }
  }

  // After takes(): the tiles, of a session whose pages are attached.
  void load_tiles(SessionReader::Index& saved) {
    for (int layer = 0; index_ != nullptr && layer < layers(); ++layer) {
      std::vector<std::byte> tile(index_->tile_bytes(layer));
      for (std::int64_t i = 0; i < tiles_of(kv_->length()) && !tile.empty(); ++i) {
        saved.read(tile);
        index_->load_tile(layer, slot(i), tile.data());
        kv_->pool()->queue().synchronize();
      }
    }
  }
  // After load_tiles(), once the session has all its tokens.
  void load_sums(SessionReader::Index& saved) {
    for (int layer = 0; index_ != nullptr && layer < layers(); ++layer) {
      std::vector<std::byte> sums(index_->layer_sum_bytes(layer));
      if (sums.empty()) continue;
      saved.read(sums);
      index_->load_sums(layer, kv_->sequence(), sums.data());
      kv_->pool()->queue().synchronize();
    }
  }

  static std::int64_t tiles_of(std::int64_t tokens) { return tokens / kPageTokens / kTilePages; }

 private:
  int layers() const { return kv_->plan().shape.layers; }
  std::int32_t slot(std::int64_t tile) const {
    return kv_->pool()->tables().tile(kv_->sequence(), tile);
  }

  KvSession* kv_;
  KeyIndex* index_ = nullptr;
  std::string name_;  // padded to whole words
};

// Opens a saved session that has to fit `context`.
SessionReader open_saved(const Engine::Impl& engine, const std::filesystem::path& directory,
                         std::int64_t context) {
  SessionReader saved(directory, engine.saved_kind());
  const std::int64_t tokens = std::ssize(saved.head().tokens);
  if (tokens <= context) return saved;
  throw Error(ErrorCode::prompt, directory.string() + ": the saved session has " +
                                     std::to_string(tokens) +
                                     " tokens, and the planned context is " +
                                     std::to_string(context) + "; raise `context`");
}

}  // namespace

SavedKind Engine::Impl::saved_kind() const {
  return {fingerprint_of(checkpoint), info.kv, info.vocabulary};
}

void Session::Impl::save(const std::filesystem::path& directory, std::string_view note) {
  Turn turn(*engine, *this);
  kv.require_whole();
  if (kv.length() == 0) {
    throw Error(ErrorCode::usage, "the session has no tokens yet, so there is nothing to save");
  }
  check(std::ssize(history) >= kv.length(), "a session that forgot its tokens");
  SavedHead head;
  head.tokens.assign(history.begin(), history.begin() + kv.length());
  head.uncorrected = std::ssize(uncorrected);
  head.note = note;
  IndexOfSession index(kv);
  SessionWriter writer(directory, engine->saved_kind(), head, index.bytes(kv.length()));
  for (std::int64_t page = 0; page * kPageTokens < kv.length(); ++page) {
    if (page > 0) turn.pause();
    for (int layer = 0; layer < kv.plan().shape.layers; ++layer) {
      writer.write(kv.page_rows(layer, page));
    }
  }
  index.save(writer);
  writer.commit();
}

void Session::Impl::load(const SessionReader& saved) {
  Turn turn(*engine, *this);
  const KvShape& shape = kv.plan().shape;
  const Buffer buffer = engine->backend->allocate(Tier::host, saved_piece_bytes(shape));
  std::vector<RowSpan> heads(static_cast<std::size_t>(shape.kv_heads));
  const std::span<const TokenId> tokens = saved.head().tokens;
  const std::int64_t total = std::ssize(tokens);
  kv.expect(total);
  IndexOfSession index(kv);
  SessionReader::Index saved_index(saved);
  const std::int64_t tiles = IndexOfSession::tiles_of(total);
  const std::shared_ptr<SavedSums> sums =
      tiles > 0 && kv.pool()->attaches() ? saved.sector_sums() : nullptr;
  const bool attaches = sums != nullptr && index.takes(saved_index, total);
  if (attaches) {
    const std::int64_t pages = tiles * kTilePages;
    kv.attach(pages, kv.pool()->disk()->store().open(saved.open_rows(), saved.rows_offset(), sums));
    index.load_tiles(saved_index);
    remember(tokens.first(static_cast<std::size_t>(pages * kPageTokens)));
  }
  while (kv.length() < total) {
    if (kv.length() > 0) turn.pause();
    const std::int64_t page = kv.length() / kPageTokens;
    const std::int64_t rows = saved.layout().page_tokens(page);
    const std::int64_t first = kv.length() % kPageTokens;
    const std::int64_t count = std::min(rows - first, std::int64_t{kv.plan().chunk});
    const std::span<std::byte> piece(buffer.data(),
                                     static_cast<std::size_t>(saved.layout().piece_bytes(page)));
    for (std::size_t head = 0; head < heads.size(); ++head) {
      const std::size_t row =
          head * static_cast<std::size_t>(rows) + static_cast<std::size_t>(first);
      heads[head] = {buffer.data() + row * shape.row_bytes(), count};
    }
    engine->decoder->restore(count, kv, [&](int layer) {
      saved.read(page, layer, piece);
      return std::span<const RowSpan>(heads);
    });
    remember(tokens.subspan(static_cast<std::size_t>(page * kPageTokens + first),
                            static_cast<std::size_t>(count)));
  }
  engine->queue->synchronize();
  if (attaches) index.load_sums(saved_index);
  if (kv.policy().correct == 0) return;
  const auto waiting = tokens.last(static_cast<std::size_t>(saved.head().uncorrected));
  uncorrected.assign(waiting.begin(), waiting.end());
}

void Session::save(const std::filesystem::path& directory, std::string_view note) {
  share()->save(directory, note);
}

void Session::load(const std::filesystem::path& directory) {
  const std::shared_ptr<Impl> self = share();
  if (self->kv.length() > 0) {
    throw Error(ErrorCode::usage, "a session with tokens cannot load others; make a sibling");
  }
  self->load(open_saved(*self->engine, directory, self->kv.plan().context));
}

Session Engine::load_session(const std::filesystem::path& directory,
                             const SessionOptions& options) {
  const SessionReader saved = open_saved(impl(), directory, options.context);
  SessionOptions loading = options;
  loading.loads = true;
  Session session = new_session(loading);
  session.impl().load(saved);
  return session;
}

SavedSession Engine::saved_session(const std::filesystem::path& directory) const {
  const SessionReader saved(directory, impl().saved_kind());
  return {saved.head().tokens, saved.head().note};
}

void Engine::require_savable(const std::filesystem::path& directory, std::int64_t tokens) const {
  SessionWriter::require_savable(directory, impl().saved_kind(), tokens);
}

}  // namespace sluice
