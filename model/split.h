// The pre-tokenizer: cuts text into the pieces within which tokens may merge.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model/regex.h"

namespace sluice {

class Splitter {
 public:
  using Sink = std::function<void(std::string_view piece)>;

  // Each expression cuts further what those before it left whole. Throws what Regex throws.
  explicit Splitter(const std::vector<std::string>& patterns);

  // Hands the pieces of `text`, which must be valid UTF-8, to `sink` in order. A match is a piece
  // and so is what lies between two matches ("isolated"); no piece is empty and together they are
  // the text. Throws what Matcher::find throws.
  void split(std::string_view text, const Sink& sink) const;

 private:
  std::vector<Regex> regexes_;
};

}  // namespace sluice
