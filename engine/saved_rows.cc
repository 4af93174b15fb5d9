// Sessions to and from disk: see Session::save() and Engine::load_session().
#include <algorithm>
#include <string>
#include <vector>

#include "engine/engine_impl.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// The buffer through which the rows of one (page, layer) piece pass while they are loaded.
std::size_t loading_bytes(const KvShape& shape) {
  return static_cast<std::size_t>(kPageTokens * shape.kv_heads) * shape.row_bytes();
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
  SessionWriter writer(directory, engine->saved_kind(), head);
  for (std::int64_t page = 0; page * kPageTokens < kv.length(); ++page) {
    if (page > 0) turn.pause();
    for (int layer = 0; layer < kv.plan().shape.layers; ++layer) {
      writer.write(kv.page_rows(layer, page));
    }
  }
  writer.commit();
}

void Session::Impl::load(const SessionReader& saved) {
  Turn turn(*engine, *this);
  const KvShape& shape = kv.plan().shape;
  const Buffer buffer = engine->backend->allocate(Tier::host, loading_bytes(shape));
  std::vector<RowSpan> heads(static_cast<std::size_t>(shape.kv_heads));
  const std::span<const TokenId> tokens = saved.head().tokens;
  const std::int64_t total = std::ssize(tokens);
  kv.expect(total);
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
  if (kv.policy().correct == 0) return;
  const auto waiting = tokens.last(static_cast<std::size_t>(saved.head().uncorrected));
  uncorrected.assign(waiting.begin(), waiting.end());
}

void Session::save(const std::filesystem::path& directory, std::string_view note) {
  share()->save(directory, note);
}

Session Engine::load_session(const std::filesystem::path& directory,
                             const SessionOptions& options) {
  const SessionReader saved(directory, impl().saved_kind());
  const std::int64_t tokens = std::ssize(saved.head().tokens);
  if (tokens > options.context) {
    throw Error(ErrorCode::prompt, directory.string() + ": the saved session has " +
                                       std::to_string(tokens) +
                                       " tokens, and the planned context is " +
                                       std::to_string(options.context) + "; raise `context`");
  }
  Session session = make_session(options, loading_bytes(impl().info.kv));
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
