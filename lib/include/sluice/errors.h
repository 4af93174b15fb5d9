// All operating errors that Sluice reports. Programmer errors (a broken precondition inside
// Sluice) are assertions instead, see lib/check.h.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace sluice {

// Errors, grouped by what the user has to change.
enum class ErrorCode : std::uint8_t {
  usage,        // a flag, an argument or a call is invalid
  not_found,    // a file or directory is missing or unreadable
  corrupt,      // a file contradicts its format, or a tensor contradicts the config
  unsupported,  // a valid model, option or machine that Sluice does not handle
  tokenizer,    // tokenizer.json is broken, or lacks something that the text needs
  prompt,       // the prompt is empty, not UTF-8, longer than the planned context, or has a token
                // outside the vocabulary
  memory,       // a memory cap, pool or queue is too small for the request, or memory ran out
  io,           // reading or writing failed (a full disk, a device error)
  internal,     // a bug in Sluice, or a session used after it failed
  numeric       // a NaN or an infinity where a finite number is required
};

// The name of the enumerator, such as "not_found".
std::string_view to_string(ErrorCode code);

// `what()` is one line: the fault, its place (file, or field in backquotes) and the remedy.
// Regardless of the content of a file or flag it is at most some kilobytes of UTF-8, with control
// and formatting characters escaped as \xNN.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, std::string_view message);
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace sluice
