#include "engine/unicode/code_set.h"

#include <algorithm>
#include <utility>

namespace sluice {

CodeSet::CodeSet(std::initializer_list<CodeRange> ranges) : CodeSet(std::vector(ranges)) {}

CodeSet::CodeSet(std::vector<CodeRange> ranges) {
  std::sort(ranges.begin(), ranges.end());
  for (const CodeRange& range : ranges) {
    if (!ranges_.empty() && range.first <= ranges_.back().last + 1) {
      ranges_.back().last = std::max(ranges_.back().last, range.last);
    } else {
      ranges_.push_back(range);
    }
  }
}

bool CodeSet::contains(char32_t code_point) const {
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), code_point,
                       [](char32_t point, const CodeRange& range) { return point < range.first; });
  return after != ranges_.begin() && code_point <= std::prev(after)->last;
}

CodeSet CodeSet::operator~() const {
  CodeSet result;
  char32_t next = 0;
  for (const CodeRange& range : ranges_) {
    if (range.first > next) result.ranges_.push_back({next, range.first - 1});
    next = range.last + 1;
  }
  if (next <= kLast) result.ranges_.push_back({next, kLast});
  return result;
}

CodeSet operator|(const CodeSet& a, const CodeSet& b) {
  std::vector<CodeRange> ranges = a.ranges_;
  ranges.insert(ranges.end(), b.ranges_.begin(), b.ranges_.end());
  return CodeSet(std::move(ranges));
}

}  // namespace sluice
