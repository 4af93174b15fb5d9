// Sessions to and from disk: see Session::save() and Engine::load_session().
#include <algorithm>
#include <cstring>
#include <string>

#include "engine/engine_impl.h"
#include "lib/check.h"
#include "sluice/errors.h"
#include "sluice/half.h"

namespace sluice {
namespace {

// Buffers through which the rows of one (page, layer) piece pass while they are loaded.
struct LoadingBytes {
  std::size_t piece = 0;   // as saved
  std::size_t floats = 0;  // as floats, if activations are not in host memory

  LoadingBytes(const KvShape& shape, const Backend& backend)
      : piece(static_cast<std::size_t>(kPageTokens * shape.kv_heads) * shape.row_bytes()) {
    if (backend.info().compute_tier == Tier::host) return;
    floats =
        static_cast<std::size_t>(kPageTokens * shape.kv_heads * shape.head_dim) * 2 * sizeof(float);
  }
  std::uint64_t sum() const { return piece + floats; }
};

template <typename Stored, typename Convert>
void convert(const std::byte* from, std::int64_t count, float* to, Convert to_float) {
  for (std::int64_t i = 0; i < count; ++i) {
    Stored stored;
    std::memcpy(&stored, from + static_cast<std::size_t>(i) * sizeof stored, sizeof stored);
    to[i] = to_float(stored);
  }
}

// Exact.
void to_floats(const std::byte* from, DType element, std::int64_t count, float* to) {
  switch (element) {
    case DType::f32:
      return convert<float>(from, count, to, [](float value) { return value; });
    case DType::f16:
      return convert<std::uint16_t>(from, count, to, &f16_to_float);
    case DType::bf16:
      return convert<std::uint16_t>(from, count, to, &bf16_to_float);
  }
}

// Rows [first, first + count) of a piece [kv_heads, rows, row_bytes] as floats [count, 2, kv_heads,
// head_dim].
void unpack(const KvShape& shape, std::span<const std::byte> piece, std::int64_t rows,
            std::int64_t first, std::int64_t count, std::span<float> kv) {
  const std::int64_t dim = shape.head_dim;
  const std::int64_t width = shape.kv_heads * dim;
  const DType element = shape.rows.element;
  for (std::int64_t head = 0; head < shape.kv_heads; ++head) {
    for (std::int64_t i = 0; i < count; ++i) {
      const std::byte* const row =
          piece.data() + static_cast<std::size_t>(head * rows + first + i) * shape.row_bytes();
      float* const key = kv.data() + i * 2 * width + head * dim;
      to_floats(row, element, dim, key);
      to_floats(row + shape.value_offset(), element, dim, key + width);
    }
  }
}

}  // namespace

// Rows are loaded as floats, and coding those again would give other codes.
SavedKind Engine::Impl::saved_kind() const {
  if (info.kv.rows.is_coded()) {
    throw Error(ErrorCode::unsupported, "sessions with rows of " + to_string(info.kv.rows) +
                                            " cannot be saved or loaded; set `kv_dtype` to bf16, "
                                            "f16 or f32");
  }
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
  const LoadingBytes bytes(shape, *engine->backend);
  const Buffer buffer = engine->backend->allocate(Tier::host, bytes.piece);
  const Buffer staging = engine->backend->allocate(Tier::host, bytes.floats);
  const std::span<float> floats(staging.floats(), bytes.floats / sizeof(float));
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
    engine->decoder->restore(count, kv, floats, [&](int layer, std::span<float> to) {
      saved.read(page, layer, piece);
      unpack(shape, piece, rows, first, count, to);
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
  const LoadingBytes bytes(impl().info.kv, *impl().backend);
  Session session = make_session(options, bytes.sum());
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
