// Conversations: questions and answers, rendered by the model's chat template.
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

// A question and its answer.
struct ChatTurn {
  std::string question;
  std::string answer;
  std::vector<TokenId> tokens;  // the answer's, as drawn; empty: the tokenizer's
};

// The chat template of a checkpoint, executed as transformers does.
class ChatFormat {
 public:
  // Loads the template from the first of chat_template.jinja, chat_template.json and
  // tokenizer_config.json that has one. Throws Error{unsupported} if none has or Sluice cannot run
  // it, Error{corrupt} for broken files, Error{tokenizer} if the template writes a BOS or EOS token
  // that the tokenizer lacks. `tokenizer` must outlive the format.
  static ChatFormat load(const std::filesystem::path& checkpoint, const Tokenizer& tokenizer);

  ChatFormat(ChatFormat&&) noexcept;
  ChatFormat& operator=(ChatFormat&&) noexcept;
  ~ChatFormat();

  // The file that has the template.
  const std::filesystem::path& file() const;
  // Tokens with which the template ends an answer, besides the model's EOS tokens; may be empty.
  std::span<const TokenId> end_tokens() const;
  // Strings in the template's output that look like control tokens, such as <|user|>, but that the
  // tokenizer lacks: they are encoded as text, as in transformers. Either the model was trained
  // with them as text, or the template belongs to another tokenizer.
  std::span<const std::string> text_markers() const;
  // Returns true if the template puts the system prompt before the newest question, because then
  // everything from the previous question on is rendered anew with every turn.
  bool moves_system() const;

  // The ids of a conversation whose last turn has no answer yet. Only the template's own text
  // becomes control tokens; questions, answers and `system` stay text. An empty `system` means no
  // system prompt, for which the template may have a default. Throws Error{prompt} if there is no
  // turn, a text is not UTF-8 or the template refuses the conversation, Error{unsupported} if the
  // template has no place for a system prompt or uses a feature that Sluice lacks.
  std::vector<TokenId> render(std::string_view system, std::span<const ChatTurn> turns) const;

 private:
  struct Impl;
  explicit ChatFormat(std::unique_ptr<const Impl> impl);
  const Impl& impl() const;
  std::unique_ptr<const Impl> impl_;
};

// A conversation in a session. Earlier turns stay in the session, so a question costs only its own
// tokens. If the template renders an earlier turn differently (for example without the model's
// reasoning), the session is truncated at the first different token and continues from there.
class Chat {
 public:
  // `engine` must outlive the chat; `session` must belong to it and be empty.
  Chat(const Engine& engine, Session session, ChatFormat format, std::string system = {});

  // The conversation that save() put into `directory`, in the session that
  // Engine::load_session() made of it; `format` as it was then. Nothing is computed again. Throws
  // Error{usage} if another program or `sluice generate` saved the session, Error{corrupt} if it
  // contradicts itself, and what Engine::load_session() throws.
  static Chat load(Engine& engine, const std::filesystem::path& directory,
                   const SessionOptions& options, ChatFormat format);
  // Saves the session with all turns and the text of the system, which load() restores. Throws what
  // Session::save() throws.
  void save(const std::filesystem::path& directory);

  // Asks, and generates the answer. options.sampling.max_tokens is clamped to the room left in the
  // context; a repetition penalty covers the whole conversation.
  // If there is no answer, because prefill was interrupted or failed, the question counts as not
  // asked. Throws Error{prompt} if the context is full, Error{usage} in a callback of another
  // question, and what generate() throws.
  GenerateResult ask(std::string question, GenerateOptions options);
  // Forgets all turns. Throws Error{usage} in a callback of a question.
  void reset();

  const std::string& system() const { return system_; }
  std::span<const ChatTurn> turns() const { return turns_; }
  // The tokens in the session: the rendered conversation except the end of the last answer.
  std::span<const TokenId> tokens() const { return held_; }
  const Session& session() const { return session_; }

 private:
  // Truncates the session to its common prefix with `ids`, and returns the prefix's tokens.
  std::size_t keep_common(std::span<const TokenId> ids);
  void require_no_question() const;
  // Truncates the session. Rows that a disk has lost, now or in an earlier question, are computed
  // again.
  void cut(std::size_t length);
  // Drops the session's tokens from `token` on, after a question that failed.
  void forget_from(std::size_t token);

  const Engine* engine_;
  Session session_;
  ChatFormat format_;
  std::string system_;
  std::vector<ChatTurn> turns_;
  std::vector<TokenId> held_;  // tokens in the session
  bool is_asking_ = false;
};

}  // namespace sluice
