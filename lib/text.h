// Makes text from outside (files, flags, paths) and numbers fit for messages.
#pragma once

#include <array>
#include <charconv>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Any `text` as one line: control and formatting characters, line breaks and bytes that are not
// UTF-8 become \xNN each. A long text loses its middle, so that a message keeps both its file and
// its reason. Idempotent.
std::string one_line(std::string_view text);

// The same, shorter, between single quotes: a name or a value inside a message.
std::string in_quotes(std::string_view text);

// The shortest text that reads back as this number, in every locale: a limit of 1 and a value of
// 1.0000001 look different.
template <typename T>
std::string digits(T value) {
  std::array<char, 32> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

// "a, b or c".
std::string alternatives(const std::vector<std::string>& names);

// Says that a text of `bytes` bytes breaks off or goes wrong at `byte`, counted from 1.
std::string json_fault(std::size_t byte, std::size_t bytes);

}  // namespace sluice
