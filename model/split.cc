#include "model/split.h"

#include <optional>
#include <span>

#include "model/utf8.h"

namespace sluice {
namespace {

void split_with(std::span<Matcher> matchers, std::string_view text, const Splitter::Sink& sink) {
  if (text.empty()) return;
  if (matchers.empty()) return sink(text);
  std::size_t done = 0;
  std::size_t from = 0;
  const auto cut = [&](std::size_t end) {
    split_with(matchers.subspan(1), text.substr(done, end - done), sink);
    done = end;
  };
  while (from < text.size()) {
    const std::optional<Matcher::Span> match = matchers.front().find(text, from);
    if (!match) break;
    cut(match->begin);
    cut(match->end);
    from = match->end;
    // An empty match cuts, too; the search goes on behind the next character.
    if (match->begin == match->end && from < text.size()) {
      from += next_utf8_unit(text.substr(from)).length;
    }
  }
  cut(text.size());
}

}  // namespace

Splitter::Splitter(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) regexes_.emplace_back(pattern);
}

void Splitter::split(std::string_view text, const Sink& sink) const {
  std::vector<Matcher> matchers(regexes_.begin(), regexes_.end());
  split_with(matchers, text, sink);
}

}  // namespace sluice
