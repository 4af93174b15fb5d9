// Text that records the origin of every byte, with the operations of Python's str.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::jinja {

// The origin of a byte: the template, or the number that the caller gave to the text it passed in.
using Origin = std::uint32_t;
inline constexpr Origin kTemplate = 0;

// UTF-8. Offsets are in bytes and between characters.
class Text {
 public:
  Text() = default;
  explicit Text(std::string_view bytes, Origin origin = kTemplate)
      : bytes_(bytes), origins_(bytes.size(), origin) {}

  const std::string& bytes() const { return bytes_; }
  std::span<const Origin> origins() const { return origins_; }  // one per byte
  std::size_t size() const { return bytes_.size(); }

  void append(const Text& other) { append(other, 0, other.size()); }
  void append(const Text& other, std::size_t begin, std::size_t end);
  void append(char32_t character, Origin origin);
  Text slice(std::size_t begin, std::size_t end) const;

 private:
  std::string bytes_;
  std::vector<Origin> origins_;
};

// Length in characters, as Python counts them.
std::size_t length(const Text& text);
// Offset of character `index`, or of the end.
std::size_t offset_of(const Text& text, std::size_t index);

// The first offset of `part` from `from` on, in linear time.
std::size_t find_part(std::string_view text, std::string_view part, std::size_t from = 0);

enum class Side : std::uint8_t { left, right, both };
// Strips white space, or else the characters of `what`, from the ends.
Text strip(const Text& text, Side side, const std::optional<std::string>& what = std::nullopt);

// Splits at `separator`, which is not empty, or else at white space; at most `most` times (-1: no
// limit), from the left or from the right.
std::vector<Text> split(const Text& text, const std::optional<std::string>& separator,
                        std::int64_t most = -1, bool from_right = false);
std::vector<Text> split_lines(const Text& text);

// Replaces the first `most` occurrences (-1: all) of `from`, which is not empty.
Text replace(const Text& text, std::string_view from, const Text& to, std::int64_t most = -1);

// Change case letter by letter, by Unicode's simple mappings.
Text lower(const Text& text);
Text upper(const Text& text);
Text capitalize(const Text& text);
Text title(const Text& text);

// Python's str.isspace() for one character.
bool is_space(char32_t c);

}  // namespace sluice::jinja
