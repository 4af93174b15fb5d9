// How a family of models writes a conversation, read from a checkpoint's chat template.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Where the text of the system stands.
enum class SystemPlace : std::uint8_t {
  own,             // before the first question, as a message of its own
  first_question,  // in front of the first question, with a blank line between
  last_question,   // in front of the newest question: it moves from turn to turn
  none
};

// A conversation is: start, system message, and for every turn question and answer. What stands
// around them is text with control tokens in it.
struct ChatTemplate {
  std::string family;                 // "ChatML", "Llama 3", "Mistral"
  std::vector<std::string> controls;  // the control tokens, which the tokenizer has to have
  std::vector<std::string> ends;      // those of them that end an answer
  std::string start;                  // a BOS token or nothing
  SystemPlace system = SystemPlace::own;
  std::string system_before;
  std::string system_after;
  std::string system_preamble;                // in front of any text of the system
  bool always_system = false;                 // a system message even without text
  std::optional<std::string> default_system;  // the text where none is given
  bool needs_system = false;                  // its default is computed, so one has to be given
  std::string question_before;
  std::string question_after;
  std::string answer_before;
  std::string answer_opens;  // what a new answer follows: answer_before, less what the model writes
                             // of it, or with what a model that thinks aloud begins with
  std::string answer_after;
  // White space around them is removed.
  bool trims_system = false;
  bool trims_question = false;
  bool trims_answer = false;
  bool drops_thinking = false;  // of earlier answers: all up to the last "</think>"
};

// What a template may refer to.
struct TemplateTokens {
  std::string bos;    // empty: none
  std::string eos;    // empty: none
  std::string today;  // such as "26 Jul 2024"
};

// Recognises a family by its markers and reads the details from the text that its template writes;
// the template is not run. Throws Error{unsupported} for another family, naming its first marker,
// and for a form of these that would be written in a way not known here.
// Sources: the templates of Qwen2, Qwen2.5, Qwen3, SmolLM2 and Hermes (ChatML), of Llama 3 to 3.3,
// and of Mistral's instruct models with the tokenizers of version 1, 3 and 7.
ChatTemplate recognise_template(std::string_view source, const TemplateTokens& tokens);

}  // namespace sluice
