// Ends a stream of text and special tokens before the first stop string in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sluice/tokenizer.h"
#include "sluice/types.h"

namespace sluice {

// A token that decoded text does not show ("<|im_end|>").
struct SpecialToken {
  TokenId id = 0;
  std::string text;  // never empty
};

// The special tokens of a tokenizer whose text occurs in one of the stop strings.
std::vector<SpecialToken> special_tokens_in(std::span<const std::string> stops,
                                            const Tokenizer& tokenizer);

// Holds text back while it may yet become a stop string, so that no part of one is ever returned.
// The first stop string is the one that completes first and, of several that end with the same
// character, the longest. How the text is cut into pieces does not matter.
//
// Special tokens are not part of the text, but a stop string may ask for them: where a stop string
// has the text of a special token, both that token and the same characters as ordinary text match.
// Special tokens that a stop string does not have are skipped in the search for it.
class StopMatcher {
 public:
  // No string may be empty. `special`: the tokens that the strings may ask for. Of several that
  // match at one place of a string the longest counts, as in tokenizing.
  explicit StopMatcher(std::span<const std::string> stops,
                       std::span<const SpecialToken> special = {});

  // Returns the text that can no longer be part of a stop string; after a stop string, nothing.
  std::string push(std::string_view piece);
  // push() for a special token at this place of the stream.
  std::string push_special(TokenId id);
  // Returns the text still held back when the stream ends without a stop string.
  std::string finish();

  bool stopped() const { return stopped_; }
  // Returns true if any stop string asks for this special token; others need not be pushed.
  bool asks_for(TokenId id) const;

 private:
  // A byte of text, or a special token: its id above all bytes.
  using Symbol = std::int64_t;
  static constexpr Symbol kFirstToken = 256;
  static Symbol symbol_of(char byte) { return static_cast<unsigned char>(byte); }
  static Symbol symbol_of(TokenId id) { return kFirstToken + id; }

  // A stop string, with its special tokens or as text alone, and the state of its
  // Knuth-Morris-Pratt search.
  struct Pattern {
    std::vector<Symbol> symbols;
    std::vector<std::size_t> border;  // by length: the longest proper prefix that is a suffix
    std::vector<std::size_t> bytes;   // by length: bytes of text in a prefix
    std::size_t matched = 0;          // length of the longest prefix that the stream ends with

    bool has(Symbol symbol) const;
    std::size_t advance(std::size_t length, Symbol next) const;
  };

  void add(std::vector<Symbol> symbols);
  // Takes one symbol, whose bytes of text are held already; true if it completes a stop string.
  bool take(Symbol next);
  // Releases the held text that can no longer become part of a stop string.
  std::string certain();

  std::vector<Pattern> patterns_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace sluice
