#include "model/stop.h"

#include <algorithm>
#include <utility>

#include "lib/check.h"

namespace sluice {

StopMatcher::StopMatcher(std::span<const std::string> stops) {
  for (const std::string& text : stops) {
    check(!text.empty(), "an empty stop string");
    Stop stop{text, std::vector<std::size_t>(text.size() + 1, 0), 0};
    for (std::size_t length = 2; length <= text.size(); ++length) {
      stop.border[length] = advance(stop, stop.border[length - 1], text[length - 1]);
    }
    stops_.push_back(std::move(stop));
  }
}

// Length of the prefix matched after one more character; `matched` must not be the whole string.
std::size_t StopMatcher::advance(const Stop& stop, std::size_t matched, char next) {
  while (matched > 0 && stop.text[matched] != next) matched = stop.border[matched];
  return stop.text[matched] == next ? matched + 1 : 0;
}

std::string StopMatcher::push(std::string_view piece) {
  if (stopped_) return {};
  for (const char next : piece) {
    held_ += next;
    std::size_t complete = 0;
    for (Stop& stop : stops_) {
      stop.matched = advance(stop, stop.matched, next);
      if (stop.matched == stop.text.size()) complete = std::max(complete, stop.matched);
    }
    if (complete > 0) {
      stopped_ = true;
      held_.resize(held_.size() - complete);
      return finish();
    }
  }
  std::size_t keep = 0;
  for (const Stop& stop : stops_) keep = std::max(keep, stop.matched);
  std::string certain = held_.substr(0, held_.size() - keep);
  held_.erase(0, certain.size());
  return certain;
}

std::string StopMatcher::finish() { return std::exchange(held_, {}); }

}  // namespace sluice
