// Text that remembers of every byte who wrote it, with the operations that Python's str has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::jinja {

// Who wrote a byte: the template, or whatever number the caller gave to a text of its own.
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

// In characters, as Python counts them.
std::size_t length(const Text& text);
// Where character `index` begins, or the end.
std::size_t offset_of(const Text& text, std::size_t index);

// The first place of `part` from `from` on, in linear time.
std::size_t find_part(std::string_view text, std::string_view part, std::size_t from = 0);

enum class Side : std::uint8_t { left, right, both };
// Without white space, or without those of the characters `what`, at its ends.
Text strip(const Text& text, Side side, const std::optional<std::string>& what = std::nullopt);

// At every `separator`, which is not empty, or at white space without one; `most` times from the
// left, or from the right (-1: everywhere).
std::vector<Text> split(const Text& text, const std::optional<std::string>& separator,
                        std::int64_t most = -1, bool from_right = false);
std::vector<Text> split_lines(const Text& text);

// The first `most` places of `from`, which is not empty (-1: all).
Text replace(const Text& text, std::string_view from, const Text& to, std::int64_t most = -1);

// Letters one by one, as Unicode's simple mappings have it.
Text lower(const Text& text);
Text upper(const Text& text);
Text capitalize(const Text& text);
Text title(const Text& text);

// Whether Python's str.isspace() says so of the character.
bool is_space(char32_t c);

}  // namespace sluice::jinja
