// Turns an answer's tokens into text, and ends it before the first stop string.
#pragma once

#include <span>
#include <string>

#include "engine/stop.h"
#include "sluice/tokenizer.h"
#include "sluice/types.h"

namespace sluice {

class AnswerText {
 public:
  // `tokenizer` must outlive it. No stop string may be empty.
  AnswerText(const Tokenizer& tokenizer, std::span<const std::string> stops)
      : decoder_(tokenizer), stop_(stops, special_tokens_in(stops, tokenizer)) {}

  // Each returns the text that is certain now: whole characters that no stop string can claim.
  std::string push(TokenId id);
  // A token that ends the text. It is no part of it, but a stop string may ask for it.
  std::string push_end(TokenId id);
  // The rest. An unfinished character becomes U+FFFD, which may complete a stop string.
  std::string finish();

  // Returns true once a stop string has been completed.
  bool stopped() const { return stop_.stopped(); }

 private:
  std::string push_special(TokenId id);

  StreamDecoder decoder_;
  StopMatcher stop_;
};

}  // namespace sluice
