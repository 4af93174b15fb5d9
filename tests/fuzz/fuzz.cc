#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace sluice::fuzz {
namespace {

constexpr std::size_t kLongestMessage = 2000;  // bytes

bool has_control_character(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x20 || byte == 0x7F;
  });
}

// UTF-8 codings by length: mask and value of the lead byte, and the least code point that needs
// this length.
struct Coding {
  std::uint32_t mask;
  std::uint32_t lead;
  std::uint32_t least;
};
constexpr std::array<Coding, 4> kCodings = {
    {{0x80, 0x00, 0}, {0xE0, 0xC0, 0x80}, {0xF0, 0xE0, 0x800}, {0xF8, 0xF0, 0x10000}}};

// Bytes of the first character; 0 if it is invalid.
std::size_t character_length(std::string_view bytes) {
  const auto byte = [&](std::size_t i) {
    return std::uint32_t{static_cast<unsigned char>(bytes[i])};
  };
  for (std::size_t length = 1; length <= kCodings.size(); ++length) {
    const Coding& coding = kCodings.at(length - 1);
    if ((byte(0) & coding.mask) != coding.lead) continue;
    if (bytes.size() < length) return 0;
    std::uint32_t code_point = byte(0) & ~coding.mask;
    for (std::size_t i = 1; i < length; ++i) {
      if ((byte(i) & 0xC0u) != 0x80u) return 0;
      code_point = (code_point << 6) | (byte(i) & 0x3Fu);
    }
    const bool surrogate = code_point >= 0xD800 && code_point < 0xE000;
    return code_point >= coding.least && code_point < 0x110000 && !surrogate ? length : 0;
  }
  return 0;
}

}  // namespace

void require(bool holds, std::string_view what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

Parts split_parts(std::string_view input) {
  constexpr std::string_view kLine = "\n---\n";
  const std::size_t at = input.find(kLine);
  if (at == std::string_view::npos) return {input, {}};
  return {input.substr(0, at), input.substr(at + kLine.size())};
}

std::optional<std::size_t> invalid_utf8_at(std::string_view bytes) {
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t length = character_length(bytes.substr(at));
    if (length == 0) return at;
    at += length;
  }
  return std::nullopt;
}

void require_proper(const Error& error, std::initializer_list<ErrorCode> codes) {
  const std::string_view message = error.what();
  const bool proper = !message.empty() && message.size() <= kLongestMessage &&
                      !has_control_character(message) && !invalid_utf8_at(message) &&
                      std::find(codes.begin(), codes.end(), error.code()) != codes.end();
  require(proper, "an error is one bounded line with an expected code, not these " +
                      std::to_string(message.size()) + " bytes: " + std::string(message));
}

void write_file(const std::filesystem::path& path, std::string_view content) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const ssize_t written = file < 0 ? -1 : ::write(file, content.data(), content.size());
  if (file >= 0) ::close(file);
  require(written == static_cast<ssize_t>(content.size()), "a file can be written");
}

}  // namespace sluice::fuzz
