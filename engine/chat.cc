#include "sluice/chat.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "io/json.h"
#include "sluice/errors.h"

namespace sluice {
namespace {

// A conversation as the note of its saved session.
std::string note_of(std::string_view system, std::span<const ChatTurn> turns) {
  nlohmann::json list = nlohmann::json::array();
  for (const ChatTurn& turn : turns) {
    list.push_back({{"question", turn.question}, {"answer", turn.answer}, {"tokens", turn.tokens}});
  }
  const nlohmann::json note = {{"chat", {{"system", system}, {"turns", std::move(list)}}}};
  return dump_json(note);
}

std::vector<ChatTurn> turns_of(const nlohmann::json& list) {
  std::vector<ChatTurn> turns;
  for (const nlohmann::json& turn : list) {
    turns.push_back({turn.at("question").get<std::string>(), turn.at("answer").get<std::string>(),
                     turn.at("tokens").get<std::vector<TokenId>>()});
  }
  return turns;
}

}  // namespace

Chat::Chat(const Engine& engine, Session session, ChatFormat format, std::string system)
    : engine_(&engine),
      session_(std::move(session)),
      format_(std::move(format)),
      system_(std::move(system)) {}

void Chat::save(const std::filesystem::path& directory) {
  require_no_question();
  session_.save(directory, note_of(system_, turns_));
}

Chat Chat::load(Engine& engine, const std::filesystem::path& directory,
                const SessionOptions& options, ChatFormat format) {
  const SavedSession saved = engine.saved_session(directory);
  if (!saved.note.starts_with(R"({"chat":)")) {
    throw Error(ErrorCode::usage,
                directory.string() + ": the session is no conversation; continue it as text");
  }
  try {
    const nlohmann::json chat =
        parse_json(saved.note, directory, "it is damaged; save the session again").at("chat");
    std::vector<ChatTurn> turns = turns_of(chat.at("turns"));
    Chat loaded(engine, engine.load_session(directory, options), std::move(format),
                chat.at("system").get<std::string>());
    loaded.turns_ = std::move(turns);
    const std::span<const TokenId> tokens = loaded.session_.tokens();
    loaded.held_.assign(tokens.begin(), tokens.end());
    return loaded;
  } catch (const nlohmann::json::exception&) {
    throw Error(ErrorCode::corrupt,
                directory.string() + ": the turns of the saved conversation are damaged");
  }
}

void Chat::require_no_question() const {
  if (!is_asking_) return;
  throw Error(ErrorCode::usage,
              "a callback may not change the chat: the question that it is from is not over");
}

void Chat::cut(std::size_t length) {
  try {
    session_.truncate(static_cast<std::int64_t>(length));
  } catch (const Error& error) {
    if (error.code() == ErrorCode::usage) throw;
    session_.recompute();
    session_.truncate(static_cast<std::int64_t>(length));
  }
}

void Chat::reset() {
  require_no_question();
  cut(0);
  held_.clear();
  turns_.clear();
}

std::size_t Chat::keep_common(std::span<const TokenId> ids) {
  // The last token is never kept, because the logits after it are needed.
  const std::size_t most = std::min(held_.size(), std::max<std::size_t>(ids.size(), 1) - 1);
  const auto end =
      std::mismatch(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(most), held_.begin())
          .first;
  const auto common = static_cast<std::size_t>(end - ids.begin());
  cut(common);
  held_.resize(common);
  return common;
}

// Drops what a failed step may have left of the question, NaN rows included. Errors are ignored,
// because a session that stopped inside a step cannot be cut and the caller is to see the first
// one.
void Chat::forget_from(std::size_t token) {
  held_.resize(std::min(token, held_.size()));
  try {
    session_.truncate(std::min(static_cast<std::int64_t>(held_.size()), session_.length()));
  } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
  }
}

GenerateResult Chat::ask(std::string question, GenerateOptions options) {
  require_no_question();
  std::vector<ChatTurn> turns = turns_;
  turns.push_back({std::move(question), {}, {}});
  std::vector<TokenId> ids = format_.render(system_, turns);
  const std::int64_t context = session_.plan().context;
  const std::int64_t room = context - static_cast<std::int64_t>(ids.size());
  if (room < 1) {
    throw Error(ErrorCode::prompt,
                "with this question the conversation has " + std::to_string(ids.size()) +
                    " tokens, and the planned context of " + std::to_string(context) +
                    " has no room for an answer; ask less, begin anew, or raise "
                    "`context`");
  }
  options.sampling.max_tokens =
      static_cast<int>(std::min<std::int64_t>(options.sampling.max_tokens, room));
  const std::span<const TokenId> ends = format_.end_tokens();
  options.end_tokens.insert(options.end_tokens.end(), ends.begin(), ends.end());
  const std::size_t common = keep_common(ids);
  const std::span<const TokenId> before = std::span(ids).first(common);
  options.history.insert(options.history.end(), before.begin(), before.end());
  GenerateResult result;
  try {
    is_asking_ = true;
    result = generate(*engine_, session_, std::span(ids).subspan(common), options);
  } catch (...) {
    is_asking_ = false;
    forget_from(common);
    throw;
  }
  is_asking_ = false;
  const bool answered = result.reason != FinishReason::interrupted || !result.tokens.empty();
  ids.insert(ids.end(), result.tokens.begin(), result.tokens.end());
  const auto length = static_cast<std::size_t>(session_.length());
  ids.resize(std::min(length, ids.size()));
  held_ = std::move(ids);
  cut(held_.size());
  if (!answered) return result;
  turns.back().answer = result.text;
  turns.back().tokens = result.tokens;
  turns_ = std::move(turns);
  return result;
}

}  // namespace sluice
