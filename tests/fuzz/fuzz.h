// What a fuzzer is: a function that takes any bytes, and what it may answer. NAME_fuzz.cc defines
// answer(); driver.cc, or libFuzzer, calls it.
#pragma once

#include <algorithm>
#include <concepts>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "sluice/errors.h"

namespace sluice::fuzz {

// What became of an input. Inputs whose answers differ by more than numbers and names are worth
// keeping: they took different ways through the code.
struct Answer {
  bool accepted = false;
  std::string text;  // the error's message, or what was made of an accepted input
};

// Reads `input` and holds what was made of it to its promises. `folder` is the fuzzer's own; files
// in it stay from call to call. Whatever this throws is a finding.
Answer answer(std::string_view input, const std::filesystem::path& folder);

// Ends the process, with `what` on stderr, unless `holds`.
void require(bool holds, std::string_view what);

// The input up to the first line "---", and what follows that line.
struct Parts {
  std::string_view first;
  std::string_view second;
};
Parts split_parts(std::string_view input);

// The offset of the first byte that no valid UTF-8 has there, by the definition of RFC 3629: the
// shortest coding of a code point below 0x110000 that is no surrogate.
std::optional<std::size_t> invalid_utf8_at(std::string_view bytes);

// Ends the process unless the error has one of these codes, and a message as sluice/errors.h
// promises.
void require_proper(const Error& error, std::initializer_list<ErrorCode> codes);

// The answer of a reader: an Error from `read` is a refusal; what it returns goes to `hold`, which
// checks it, gives a text for Answer and must not throw.
template <std::invocable Read, typename Hold>
Answer answer_of(std::initializer_list<ErrorCode> codes, Read read, Hold hold) {
  std::optional<decltype(read())> result;
  try {
    result.emplace(read());
  } catch (const Error& error) {
    require_proper(error, codes);
    return {false, error.what()};
  }
  return {true, hold(*result)};
}

// Replaces the file's content.
void write_file(const std::filesystem::path& path, std::string_view content);

}  // namespace sluice::fuzz
