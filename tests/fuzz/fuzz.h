// The interface of a fuzzer: a function that takes any bytes, and its allowed answers. NAME_fuzz.cc
// defines answer(); driver.cc or libFuzzer calls it.
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

// The outcome of an input. Inputs whose answers differ in more than numbers and names are worth
// keeping, because they took different paths through the code.
struct Answer {
  bool accepted = false;
  std::string text;  // the error's message, or a text made from an accepted input
};

// Reads `input` and checks the result. `folder` belongs to the fuzzer; files in it persist between
// calls. Any exception is a finding.
Answer answer(std::string_view input, const std::filesystem::path& folder);

// Ends the process, with `what` on stderr, unless `holds`.
void require(bool holds, std::string_view what);

// The input up to the first line "---", and what follows that line.
struct Parts {
  std::string_view first;
  std::string_view second;
};
Parts split_parts(std::string_view input);

// The offset of the first byte that is not valid UTF-8 by RFC 3629: the shortest coding of a code
// point below 0x110000 that is not a surrogate.
std::optional<std::size_t> invalid_utf8_at(std::string_view bytes);

// Ends the process unless the error has one of these codes and a message as sluice/errors.h
// promises.
void require_proper(const Error& error, std::initializer_list<ErrorCode> codes);

// Runs a reader: an Error from `read` is a refusal. Otherwise its result goes to `hold`, which
// checks it, returns the text for Answer and must not throw.
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
