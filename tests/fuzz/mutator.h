// Random changes of inputs, aware of what files consist of: words, numbers, quoted strings,
// brackets and little-endian lengths.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sluice::fuzz {

class Mutator {
 public:
  // Replacement words come from `corpus`. Equal seeds give equal changes.
  Mutator(std::span<const std::string> corpus, std::uint64_t seed, std::size_t max_length);

  // Returns `text` with one or more changes, at most max_length bytes; some changes take parts from
  // `other`.
  std::string mutate(std::string text, std::string_view other);

  // A number in [0, limit); `limit` must not be 0.
  std::size_t below(std::size_t limit) { return static_cast<std::size_t>(random_() % limit); }

 private:
  struct Range {
    std::size_t begin = 0;
    std::size_t length = 0;
  };

  void change(std::string& text, std::string_view other);
  void change_bytes(std::string& text);
  void change_length(std::string& text);
  void change_number(std::string& text);
  void change_piece(std::string& text, std::string_view other);

  Range random_range(std::string_view text);
  Range random_piece(std::string_view text);
  std::string random_word();

  std::vector<std::string> words_;
  std::mt19937_64 random_;
  std::size_t max_length_;
};

}  // namespace sluice::fuzz
