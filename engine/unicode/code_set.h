// A set of Unicode code points.
#pragma once

#include <compare>
#include <initializer_list>
#include <span>
#include <vector>

namespace sluice {

struct CodeRange {
  char32_t first = 0;
  char32_t last = 0;  // included
  auto operator<=>(const CodeRange&) const = default;
};

class CodeSet {
 public:
  static constexpr char32_t kLast = 0x10FFFF;

  CodeSet() = default;
  // Ranges in any order, which may overlap; none may end past kLast or before it begins.
  CodeSet(std::initializer_list<CodeRange> ranges);
  explicit CodeSet(std::vector<CodeRange> ranges);
  static CodeSet all() { return {{0, kLast}}; }

  // In order; between two of them lies at least one code point.
  std::span<const CodeRange> ranges() const { return ranges_; }
  bool empty() const { return ranges_.empty(); }
  bool contains(char32_t code_point) const;

  CodeSet operator~() const;
  friend CodeSet operator|(const CodeSet& a, const CodeSet& b);
  friend CodeSet operator&(const CodeSet& a, const CodeSet& b) { return ~(~a | ~b); }
  auto operator<=>(const CodeSet&) const = default;

 private:
  std::vector<CodeRange> ranges_;
};

}  // namespace sluice
