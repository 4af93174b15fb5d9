#include "sluice/chat.h"

#include <algorithm>
#include <utility>

#include "sluice/errors.h"

namespace sluice {

Chat::Chat(const Engine& engine, Session session, ChatFormat format, std::string system)
    : engine_(&engine),
      session_(std::move(session)),
      format_(std::move(format)),
      system_(std::move(system)) {}

void Chat::reset() {
  session_.truncate(0);
  held_.clear();
  turns_.clear();
}

std::size_t Chat::keep_common(std::span<const TokenId> ids) {
  // The logits after the last token are wanted, so that is never among them.
  const std::size_t most = std::min(held_.size(), ids.size() - 1);
  const auto end =
      std::mismatch(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(most), held_.begin())
          .first;
  const auto common = static_cast<std::size_t>(end - ids.begin());
  session_.truncate(static_cast<std::int64_t>(common));
  held_.resize(common);
  return common;
}

GenerateResult Chat::ask(std::string question, GenerateOptions options) {
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
  const auto note_held = [&] {
    const auto length = static_cast<std::size_t>(session_.length());
    held_.assign(ids.begin(),
                 ids.begin() + static_cast<std::ptrdiff_t>(std::min(length, ids.size())));
    session_.truncate(static_cast<std::int64_t>(held_.size()));
  };
  GenerateResult result;
  try {
    result = generate(*engine_, session_, std::span(ids).subspan(common), options);
  } catch (...) {
    note_held();
    throw;
  }
  const bool answered = session_.length() >= static_cast<std::int64_t>(ids.size());
  ids.insert(ids.end(), result.tokens.begin(), result.tokens.end());
  note_held();
  if (!answered) return result;
  turns.back().answer = result.text;
  turns.back().tokens = result.tokens;
  turns_ = std::move(turns);
  return result;
}

}  // namespace sluice
