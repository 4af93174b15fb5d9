// Ends a stream of text before the first stop string in it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Holds text back while it may yet become a stop string, so none is ever handed out, not even
// half of one. The first stop string is the one that is complete first and, of several that end
// with the same character, the longest. How the text is cut into pieces does not matter.
class StopMatcher {
 public:
  // No string may be empty.
  explicit StopMatcher(std::span<const std::string> stops);

  // The text that `piece` makes certain; after a stop string, nothing more.
  std::string push(std::string_view piece);
  // What is still held back when the stream ends without a stop string.
  std::string finish();

  bool stopped() const { return stopped_; }

 private:
  // A stop string with the state of its Knuth-Morris-Pratt search.
  struct Stop {
    std::string text;
    std::vector<std::size_t> border;  // by length: the longest proper prefix that is a suffix
    std::size_t matched = 0;          // length of the longest prefix that the stream ends with
  };
  static std::size_t advance(const Stop& stop, std::size_t matched, char next);

  std::vector<Stop> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace sluice
