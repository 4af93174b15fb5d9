#include "engine/answer_text.h"

namespace sluice {

std::string AnswerText::push(TokenId id) {
  if (stop_.asks_for(id)) return push_special(id);
  return stop_.push(decoder_.push(id));
}

std::string AnswerText::push_end(TokenId id) {
  return stop_.asks_for(id) ? push_special(id) : std::string();
}

std::string AnswerText::finish() {
  if (stop_.stopped()) return {};
  std::string text = stop_.push(decoder_.finish());
  if (!stop_.stopped()) text += stop_.finish();
  return text;
}

// An unfinished character ends before the token.
std::string AnswerText::push_special(TokenId id) {
  std::string text = stop_.push(decoder_.finish());
  text += stop_.push_special(id);
  return text;
}

}  // namespace sluice
