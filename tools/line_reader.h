// Lines of standard input, edited where it is a terminal.
#pragma once

#include <memory>
#include <optional>
#include <string>

namespace sluice::tools {

class LineReader {
 public:
  // With `prompt`, which may hold escape sequences for colours between bytes 0x01, lines are edited
  // on the terminal, with a history that ends with the object. Without, they are read as they come.
  explicit LineReader(const std::optional<std::string>& prompt);
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;
  ~LineReader();

  // The next line without its line break; nullopt at the end of the input. Throws Interrupted when
  // interrupted() is raised meanwhile, Error{prompt} past 1 GiB, Error{io}.
  std::optional<std::string> next();

 private:
  class Edited;
  std::optional<std::string> next_as_it_comes();

  std::unique_ptr<Edited> edited_;  // or none
  std::string pending_;             // read, but not handed out
  std::size_t searched_ = 0;        // bytes of `pending_` known to hold no line break
};

}  // namespace sluice::tools
