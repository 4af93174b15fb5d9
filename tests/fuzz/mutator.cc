#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <set>

namespace sluice::fuzz {
namespace {

// Numbers at the limits of types and of Sluice's parameters, and texts that only some readers take
// for numbers.
constexpr std::array<std::string_view, 32> kNumbers = {"0",
                                                       "1",
                                                       "-1",
                                                       "2",
                                                       "3",
                                                       "16",
                                                       "64",
                                                       "127",
                                                       "128",
                                                       "255",
                                                       "256",
                                                       "257",
                                                       "65535",
                                                       "65536",
                                                       "1048576",
                                                       "2147483647",
                                                       "2147483648",
                                                       "4294967295",
                                                       "4294967296",
                                                       "9223372036854775807",
                                                       "-9223372036854775808",
                                                       "18446744073709551615",
                                                       "18446744073709551616",
                                                       "0.5",
                                                       "1.0",
                                                       "1e-9",
                                                       "1e9",
                                                       "1e308",
                                                       "1e999",
                                                       "-0.0",
                                                       "nan",
                                                       "inf"};

// Bytes with a meaning in the formats or in UTF-8.
constexpr std::string_view kBytes =
    "\"\\{}[](),:=/|*+?.^$ \n\t\r-0129eu'\x80\xBF\xC3\xE2\xED\xF0\xFF";

constexpr std::size_t kLongestWord = 64;  // bytes

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }
bool is_number(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0 || c == '.'; }

// The offset behind the bracket that closes the one at `at`.
std::size_t after_bracket(std::string_view text, std::size_t at) {
  int depth = 0;
  for (std::size_t i = at; i < text.size(); ++i) {
    if (std::string_view("{[(").find(text[i]) != std::string_view::npos) ++depth;
    if (std::string_view("}])").find(text[i]) != std::string_view::npos && --depth == 0)
      return i + 1;
  }
  return text.size();
}

// The end of the element at `at`: a quoted string, a bracketed range, a word or one byte.
std::size_t piece_end(std::string_view text, std::size_t at) {
  if (text[at] == '"') return std::min(text.find('"', at + 1), text.size() - 1) + 1;
  if (std::string_view("{[(").find(text[at]) != std::string_view::npos) {
    return after_bracket(text, at);
  }
  std::size_t end = at;
  while (end < text.size() && is_word(text[end])) ++end;
  return std::max(end, at + 1);
}

std::vector<std::string> words_of(std::span<const std::string> corpus) {
  std::set<std::string> words;
  for (const std::string& text : corpus) {
    for (std::size_t at = 0; at < text.size(); ++at) {
      const bool begins = is_word(text[at])
                              ? at == 0 || !is_word(text[at - 1])
                              : std::string_view("\"([{").find(text[at]) != std::string_view::npos;
      if (!begins) continue;
      const std::size_t length = piece_end(text, at) - at;
      if (length <= kLongestWord) words.insert(text.substr(at, length));
    }
  }
  words.insert({"null", "true", "false", "[]", "{}", "\"\"", "\\u0000", "\\ud800"});
  return {words.begin(), words.end()};
}

}  // namespace

Mutator::Mutator(std::span<const std::string> corpus, std::uint64_t seed, std::size_t max_length)
    : words_(words_of(corpus)), random_(seed), max_length_(max_length) {}

std::string Mutator::mutate(std::string text, std::string_view other) {
  do {
    change(text, other);
    text.resize(std::min(text.size(), max_length_));
  } while (below(2) == 0);
  return text;
}

void Mutator::change(std::string& text, std::string_view other) {
  if (text.empty()) {
    text = random_word();
    return;
  }
  switch (below(10)) {
    case 0:
    case 1:
      return change_bytes(text);
    case 2:
      return change_length(text);
    case 3:
    case 4:
      return change_number(text);
    case 5:  // the front of `text` and the back of `other`
      text.erase(below(text.size()));
      text += other.substr(std::min(text.size(), other.size()));
      return;
    default:
      return change_piece(text, other);
  }
}

void Mutator::change_bytes(std::string& text) {
  const std::size_t at = below(text.size());
  const Range range = random_range(text);
  switch (below(6)) {
    case 0:
      text[at] = static_cast<char>(static_cast<unsigned char>(text[at]) ^ (1u << below(8)));
      return;
    case 1:
      text[at] = kBytes[below(kBytes.size())];
      return;
    case 2:
      text.insert(at, 1, kBytes[below(kBytes.size())]);
      return;
    case 3:
      text.erase(range.begin, range.length);
      return;
    case 4:
      text.insert(at, text.substr(range.begin, range.length));
      return;
    default:  // repeats some bytes
      const std::string part = text.substr(at, 1 + below(8));
      std::string parts;
      for (std::size_t i = below(64); i > 0; --i) parts += part;
      text.insert(at, parts);
  }
}

// Changes a length field: binary formats begin with one; elsewhere the change is noise.
void Mutator::change_length(std::string& text) {
  constexpr std::array<std::uint64_t, 8> kLengths = {
      0, 1, 8, 255, 65536, std::uint64_t{1} << 31, std::uint64_t{1} << 63, ~std::uint64_t{0}};
  const std::size_t width = std::size_t{1} << below(4);
  const std::size_t at = below(2) == 0 ? 0 : below(text.size());
  std::uint64_t value = kLengths.at(below(kLengths.size())) + below(3) - 1;
  if (below(2) == 0) value = text.size() + below(33) - 16;
  for (std::size_t i = at; i < std::min(at + width, text.size()); ++i, value >>= 8) {
    text[i] = static_cast<char>(value & 0xFFu);
  }
}

void Mutator::change_number(std::string& text) {
  const auto from = text.begin() + static_cast<std::ptrdiff_t>(below(text.size()));
  const auto begin = std::find_if(from, text.end(), is_number);
  const auto end = std::find_if_not(begin, text.end(), is_number);
  if (begin == text.end()) return change_piece(text, {});
  std::string number(begin, end);
  if (below(3) == 0) {
    char& digit = number[below(number.size())];
    digit = static_cast<char>('0' + below(10));
  } else {
    number = kNumbers.at(below(kNumbers.size()));
  }
  text.replace(begin, end, number);
}

void Mutator::change_piece(std::string& text, std::string_view other) {
  const Range piece = random_piece(text);
  const Range elsewhere = random_piece(text);
  switch (below(6)) {
    case 0:
      text.erase(piece.begin, piece.length);
      return;
    case 1:
      text.insert(elsewhere.begin, text.substr(piece.begin, piece.length));
      return;
    case 2:
      text.replace(piece.begin, piece.length, text.substr(elsewhere.begin, elsewhere.length));
      return;
    case 3:
      if (other.empty()) return;
      {
        const Range foreign = random_piece(other);
        text.replace(piece.begin, piece.length, other.substr(foreign.begin, foreign.length));
      }
      return;
    case 4:
      text.insert(piece.begin, random_word());
      return;
    default:
      text.replace(piece.begin, piece.length, random_word());
  }
}

Mutator::Range Mutator::random_range(std::string_view text) {
  const std::size_t begin = below(text.size());
  const std::size_t most = below(4) == 0 ? text.size() - begin : 16;
  return {begin, std::min(text.size() - begin, 1 + below(most))};
}

// A random element; words are taken from their first character.
Mutator::Range Mutator::random_piece(std::string_view text) {
  std::size_t begin = below(text.size());
  while (begin > 0 && is_word(text[begin]) && is_word(text[begin - 1])) --begin;
  return {begin, piece_end(text, begin) - begin};
}

std::string Mutator::random_word() {
  if (below(4) == 0) return std::string(kNumbers.at(below(kNumbers.size())));
  return words_[below(words_.size())];
}

}  // namespace sluice::fuzz
