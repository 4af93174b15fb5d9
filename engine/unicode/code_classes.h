// Classes of code points that an expression does not tell apart, as numbers below 256.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/unicode/code_set.h"

namespace sluice {

class CodeClasses {
 public:
  static constexpr std::size_t kMost = 256;

  // Two code points have the same class if every one of `sets` has both or neither. Throws
  // Error{unsupported} if that takes more than kMost classes.
  explicit CodeClasses(std::span<const CodeSet> sets);

  std::uint8_t operator[](char32_t code_point) const {
    return pages_[page_of_[code_point >> 8]][code_point & 0xFF];
  }
  // The classes of set `index`, in ascending order.
  std::span<const std::uint8_t> of(std::size_t index) const { return of_[index]; }

  // Replaces `classes` by the class of each character of `text`, which must be valid UTF-8.
  void classify(std::string_view text, std::string& classes) const;

 private:
  using Page = std::array<std::uint8_t, 256>;

  std::array<std::uint16_t, (CodeSet::kLast >> 8) + 1> page_of_{};
  std::vector<Page> pages_;
  std::vector<std::vector<std::uint8_t>> of_;
};

}  // namespace sluice
