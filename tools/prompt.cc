#include "tools/prompt.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "io/file.h"
#include "sluice/errors.h"
#include "tools/exit_code.h"
#include "tools/interrupt.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kMaxPromptBytes = std::size_t{1} << 30;

// Reads a stream to its end. `name` is for messages.
std::string read_all(int descriptor, const std::string& name) {
  if (::isatty(descriptor) != 0) {
    print_error("reading the prompt from the terminal; end it with Ctrl-D on a line of its own\n");
  }
  std::string text;
  std::array<char, 65536> piece{};
  while (true) {
    if (!wait_for_input(descriptor)) throw Interrupted("interrupted while reading the prompt");
    const ssize_t count = ::read(descriptor, piece.data(), piece.size());
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) {
      throw Error(ErrorCode::io, name + ": reading failed (" + std::strerror(errno) + ")");
    }
    if (count == 0) return text;
    text.append(piece.data(), static_cast<std::size_t>(count));
    if (text.size() > kMaxPromptBytes) {
      throw Error(ErrorCode::prompt, name + ": the prompt is larger than 1 GiB; shorten it");
    }
  }
}

// Returns true for a FIFO, a terminal or the file of a shell's <(...).
bool is_stream(const std::string& path) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  return std::filesystem::is_fifo(status) || std::filesystem::is_character_file(status);
}

std::string read_stream(const std::string& path) {
  // O_NONBLOCK: the wait for a FIFO's writer happens in wait_for_input(), which an interrupt ends.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor < 0) {
    throw Error(ErrorCode::io, path + ": cannot be opened (" + std::strerror(errno) + ")");
  }
  try {
    std::string text = read_all(descriptor, path);
    ::close(descriptor);
    return text;
  } catch (...) {
    ::close(descriptor);
    throw;
  }
}

}  // namespace

std::string read_prompt(const std::string& path) {
  if (path.empty() || path == "-") return read_all(STDIN_FILENO, "standard input");
  return is_stream(path) ? read_stream(path) : read_text_file(path, kMaxPromptBytes);
}

}  // namespace sluice::tools
