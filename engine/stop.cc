#include "engine/stop.h"

#include <algorithm>
#include <utility>

#include "lib/check.h"

namespace sluice {

std::vector<SpecialToken> special_tokens_in(std::span<const std::string> stops,
                                            const Tokenizer& tokenizer) {
  std::vector<SpecialToken> found;
  if (stops.empty()) return found;
  // Added tokens beyond the model's vocabulary are never drawn.
  for (TokenId id = 0; id < std::min(tokenizer.size(), tokenizer.vocabulary()); ++id) {
    if (!tokenizer.bytes(id).empty()) continue;  // ordinary
    std::string text = tokenizer.decode(std::span(&id, 1), true);
    const bool stands =
        !text.empty() && std::any_of(stops.begin(), stops.end(), [&](const auto& stop) {
          return stop.find(text) != std::string::npos;
        });
    if (stands) found.push_back({id, std::move(text)});
  }
  return found;
}

bool StopMatcher::Pattern::has(Symbol symbol) const {
  return std::find(symbols.begin(), symbols.end(), symbol) != symbols.end();
}

// Length of the prefix matched after one more symbol; `length` must not be the whole pattern.
std::size_t StopMatcher::Pattern::advance(std::size_t length, Symbol next) const {
  while (length > 0 && symbols[length] != next) length = border[length];
  return symbols[length] == next ? length + 1 : 0;
}

StopMatcher::StopMatcher(std::span<const std::string> stops,
                         std::span<const SpecialToken> special) {
  for (const std::string& text : stops) {
    check(!text.empty(), "an empty stop string");
    std::vector<Symbol> as_text;
    for (const char byte : text) as_text.push_back(symbol_of(byte));
    std::vector<Symbol> with_tokens;
    for (std::size_t at = 0; at < text.size();) {
      const SpecialToken* longest = nullptr;
      for (const SpecialToken& token : special) {
        const bool longer = longest == nullptr || token.text.size() > longest->text.size();
        if (longer && text.compare(at, token.text.size(), token.text) == 0) longest = &token;
      }
      with_tokens.push_back(longest != nullptr ? symbol_of(longest->id) : as_text[at]);
      at += longest != nullptr ? longest->text.size() : 1;
    }
    if (with_tokens != as_text) add(std::move(with_tokens));
    add(std::move(as_text));
  }
}

void StopMatcher::add(std::vector<Symbol> symbols) {
  Pattern pattern{std::move(symbols), {}, {}, 0};
  const std::size_t size = pattern.symbols.size();
  pattern.border.assign(size + 1, 0);
  pattern.bytes.assign(size + 1, 0);
  for (std::size_t length = 1; length <= size; ++length) {
    const Symbol last = pattern.symbols[length - 1];
    if (length > 1) pattern.border[length] = pattern.advance(pattern.border[length - 1], last);
    pattern.bytes[length] = pattern.bytes[length - 1] + (last < kFirstToken ? 1 : 0);
  }
  patterns_.push_back(std::move(pattern));
}

bool StopMatcher::asks_for(TokenId id) const {
  return std::any_of(patterns_.begin(), patterns_.end(),
                     [&](const Pattern& pattern) { return pattern.has(symbol_of(id)); });
}

bool StopMatcher::take(Symbol next) {
  std::size_t bytes = 0;  // length of the longest complete stop string
  for (Pattern& pattern : patterns_) {
    if (next >= kFirstToken && !pattern.has(next)) continue;
    pattern.matched = pattern.advance(pattern.matched, next);
    if (pattern.matched < pattern.symbols.size()) continue;
    stopped_ = true;
    bytes = std::max(bytes, pattern.bytes.back());
  }
  if (stopped_) held_.resize(held_.size() - bytes);
  return stopped_;
}

std::string StopMatcher::certain() {
  std::size_t keep = 0;
  for (const Pattern& pattern : patterns_) keep = std::max(keep, pattern.bytes[pattern.matched]);
  std::string text = held_.substr(0, held_.size() - keep);
  held_.erase(0, text.size());
  return text;
}

std::string StopMatcher::push(std::string_view piece) {
  if (stopped_) return {};
  for (const char next : piece) {
    held_ += next;
    if (take(symbol_of(next))) return finish();
  }
  return certain();
}

std::string StopMatcher::push_special(TokenId id) {
  if (stopped_) return {};
  return take(symbol_of(id)) ? finish() : certain();
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace sluice
