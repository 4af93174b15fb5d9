// Conversations: questions and answers, written as the model's chat template has them.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/engine.h"
#include "sluice/generate.h"
#include "sluice/tokenizer.h"

namespace sluice {

// A question and what was answered.
struct ChatTurn {
  std::string question;
  std::string answer;
  std::vector<TokenId> tokens;  // of the answer as they were drawn; none: the tokenizer's
};

// The chat template of a checkpoint, run as transformers runs it.
class ChatFormat {
 public:
  // From chat_template.jinja, chat_template.json or tokenizer_config.json, the first that has one.
  // Throws Error{unsupported} if none has or Sluice cannot run it, Error{corrupt} for files that
  // are broken, Error{tokenizer} if the template writes a BOS or EOS token that the tokenizer
  // lacks. `tokenizer` must outlive the format.
  static ChatFormat load(const std::filesystem::path& checkpoint, const Tokenizer& tokenizer);

  ChatFormat(ChatFormat&&) noexcept;
  ChatFormat& operator=(ChatFormat&&) noexcept;
  ~ChatFormat();

  // That the template is from.
  const std::filesystem::path& file() const;
  // Tokens that the template ends an answer with, besides the model's EOS tokens; may be none.
  std::span<const TokenId> end_tokens() const;
  // What the template writes that looks like a control token, <|user|>, and is none of the
  // tokenizer's: it is read as text, as transformers has it. Models may be trained so; else the
  // template is another tokenizer's.
  std::span<const std::string> text_markers() const;
  // Whether a text of the system stands in front of the newest question, so that everything from
  // the question before on is written anew with every turn.
  bool moves_system() const;

  // The ids of a conversation whose last turn is still to be answered. Only what the template
  // writes becomes control tokens: what the texts hold is text. An empty `system` is none: the
  // template may have a default for it. Throws Error{prompt} if there is no turn, a text is not
  // UTF-8 or the template refuses the conversation, Error{unsupported} if it has no place for a
  // text of the system or computes what Sluice does not.
  std::vector<TokenId> render(std::string_view system, std::span<const ChatTurn> turns) const;

 private:
  struct Impl;
  explicit ChatFormat(std::unique_ptr<const Impl> impl);
  const Impl& impl() const;
  std::unique_ptr<const Impl> impl_;
};

// A conversation in a session: what the session holds stays there, so that a question costs its
// own tokens and not those before. If the template writes an earlier turn anew (without what the
// model thought aloud, say), the session is cut where it differs and goes on from there.
class Chat {
 public:
  // `engine` must outlive it; `session` is the engine's and empty.
  Chat(const Engine& engine, Session session, ChatFormat format, std::string system = {});

  // Asks, and generates the answer; options.sampling.max_tokens is cut to what the context holds,
  // and a repetition penalty is of the whole conversation.
  // Without an answer, because prefill was interrupted or failed, the question counts as not
  // asked. Throws Error{prompt} if the context is full, Error{usage} in a callback of another
  // question, and what generate() throws.
  GenerateResult ask(std::string question, GenerateOptions options);
  // Forgets all turns. Throws Error{usage} in a callback of a question.
  void reset();

  std::span<const ChatTurn> turns() const { return turns_; }
  // What the session holds: of the conversation as it is written all but the end of the last
  // answer.
  std::span<const TokenId> tokens() const { return held_; }
  const Session& session() const { return session_; }

 private:
  // Keeps of the session what `ids` begin with, and returns how many tokens that are.
  std::size_t keep_common(std::span<const TokenId> ids);
  void require_no_question() const;
  // Of what the session holds, after a question that failed.
  void forget_from(std::size_t token);

  const Engine* engine_;
  Session session_;
  ChatFormat format_;
  std::string system_;
  std::vector<ChatTurn> turns_;
  std::vector<TokenId> held_;  // by the session
  bool is_asking_ = false;
};

}  // namespace sluice
