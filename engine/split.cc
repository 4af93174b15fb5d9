#include "engine/split.h"

#include <optional>
#include <span>

namespace sluice {
namespace {

void split_with(std::span<Matcher> matchers, std::string_view text, const Splitter::Sink& sink) {
  if (text.empty()) return;
  if (matchers.empty()) return sink(text);
  std::size_t done = 0;
  const auto cut = [&](std::size_t end) {
    split_with(matchers.subspan(1), text.substr(done, end - done), sink);
    done = end;
  };
  Matcher& matcher = matchers.front();
  matcher.start(text);
  while (const std::optional<Matcher::Span> match = matcher.next()) {
    cut(match->begin);
    cut(match->end);
  }
  cut(text.size());
}

}  // namespace

Splitter::Splitter(const std::vector<std::string>& patterns) {
  for (const std::string& pattern : patterns) regexes_.emplace_back(pattern);
}

Splitter::Run::Run(const Splitter& splitter, std::size_t text_bytes) : budget_(text_bytes) {
  for (const Regex& regex : splitter.regexes_) matchers_.emplace_back(regex, budget_);
}

void Splitter::Run::split(std::string_view part, const Sink& sink) {
  split_with(matchers_, part, sink);
}

}  // namespace sluice
