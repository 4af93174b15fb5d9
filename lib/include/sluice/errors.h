// Every operating error that Sluice reports. Programmer errors (a broken precondition inside
// Sluice) are assertions instead, see lib/check.h.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sluice {

// What went wrong, by what the user has to change.
enum class ErrorCode : std::uint8_t {
  usage,        // a flag or an argument makes no sense
  not_found,    // a file or directory is missing or unreadable
  corrupt,      // a file contradicts its format, or a tensor contradicts the config
  unsupported,  // a valid model, option or machine that Sluice does not handle
  tokenizer,    // tokenizer.json is broken, or lacks something that the text needs
  prompt,       // the prompt is empty, not UTF-8, or longer than the planned context
  memory,       // a memory cap is too small for what was asked
  io,           // reading or writing failed (a full disk, a device error)
  internal,     // a bug in Sluice, or a session used after it failed
  numeric       // a NaN or an infinity where there must be a number
};

// `what()` is one line: what is wrong, where (file, or field in backquotes), and what to do about
// it. Whatever a file or a flag holds, it is at most some kilobytes of UTF-8 without control or
// formatting characters, which stand there as \xNN.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string_view message);
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace sluice
