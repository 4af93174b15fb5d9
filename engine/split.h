// The pre-tokenizer: cuts text into the pieces within which tokens may merge.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/regex.h"

namespace sluice {

class Splitter {
 public:
  using Sink = std::function<void(std::string_view piece)>;

  // Each expression cuts the pieces of those before it further. Throws what Regex throws.
  explicit Splitter(const std::vector<std::string>& patterns);

  // Cuts one text, which may come in parts.
  class Run {
   public:
    // `text_bytes` is the length of the whole text; `splitter` must outlive it.
    Run(const Splitter& splitter, std::size_t text_bytes);
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

    // Hands the pieces of `part`, which must be valid UTF-8, to `sink` in order. Matches are
    // pieces, and so is the text between two matches ("isolated"); no piece is empty and together
    // they are the part. Throws what Matcher::next throws.
    void split(std::string_view part, const Sink& sink);

   private:
    StepBudget budget_;
    std::vector<Matcher> matchers_;
  };

 private:
  std::vector<Regex> regexes_;
};

}  // namespace sluice
