// A chat_template.jinja and, after a line "---", a conversation with one text per line: the
// system's (may be empty), then questions and answers in turn. A template that loads for the
// tokenizer of sluice-22m gives valid ids, the same on every call, for every UTF-8 text, or an
// error with the reason.
#include <bit>
#include <vector>

#include "sluice/chat.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/shipped_tokenizer.h"

namespace sluice::fuzz {
namespace {

struct Conversation {
  std::string system;
  std::vector<ChatTurn> turns;
};

Conversation read_conversation(std::string_view text) {
  std::vector<std::string> lines(1);
  for (const char c : text) {
    if (c == '\n') {
      lines.emplace_back();
    } else {
      lines.back() += c;
    }
  }
  Conversation conversation{lines.front(), {}};
  for (std::size_t i = 1; i < lines.size(); ++i) {
    if (i % 2 == 1) {
      conversation.turns.push_back({lines[i], {}, {}});
    } else {
      conversation.turns.back().answer = lines[i];
    }
  }
  if (conversation.turns.empty()) conversation.turns.push_back({"x", {}, {}});
  return conversation;
}

std::string hold(const ChatFormat& format, const Conversation& conversation, bool is_text) {
  const auto render = [&] { return format.render(conversation.system, conversation.turns); };
  const auto hold_ids = [&](const std::vector<TokenId>& ids) {
    for (const TokenId id : ids)
      require(id >= 0 && id < tokenizer().size(), "ids lie below the size");
    require(!invalid_utf8_at(tokenizer().decode(ids, true)), "what is written is UTF-8");
    require(render() == ids, "a conversation is always written the same");
    return std::string(static_cast<std::size_t>(std::bit_width(ids.size())), '+');
  };
  const Answer written = answer_of(
      {ErrorCode::prompt, ErrorCode::unsupported, ErrorCode::tokenizer}, render, hold_ids);
  const bool blames_text = written.text.find("UTF-8") != std::string::npos;
  require(written.accepted || !is_text || !blames_text, "texts that are UTF-8 stay so");
  return written.text + (format.moves_system() ? " moves" : "") +
         std::string(format.end_tokens().size(), '.');
}

}  // namespace

Answer answer(std::string_view input, const std::filesystem::path& folder) {
  const Parts parts = split_parts(input);
  write_file(folder / "chat_template.jinja", parts.first);
  write_file(folder / "tokenizer_config.json",
             R"({"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"})");
  const Conversation conversation = read_conversation(parts.second);
  const bool is_text = !invalid_utf8_at(parts.second);
  return answer_of(
      {ErrorCode::unsupported, ErrorCode::corrupt, ErrorCode::tokenizer},
      [&] { return ChatFormat::load(folder, tokenizer()); },
      [&](const ChatFormat& format) { return hold(format, conversation, is_text); });
}

}  // namespace sluice::fuzz
