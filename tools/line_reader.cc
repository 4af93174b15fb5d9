#include "tools/line_reader.h"

#include <histedit.h>
#include <langinfo.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <clocale>
#include <cstring>
#include <cwchar>
#include <exception>
#include <functional>
#include <string_view>
#include <utility>

#include "sluice/errors.h"
#include "tools/exit_code.h"
#include "tools/interrupt.h"
#include "tools/output.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kMaxLine = std::size_t{1} << 30;
constexpr int kHistory = 1000;  // lines
constexpr char kEscape = '\x01';

// Reads up to `size` bytes, 0 at the end; throws Interrupted or Error{io}.
std::size_t read_some(char* bytes, std::size_t size, const std::function<void()>& resumed = {}) {
  while (true) {
    if (!wait_for_input(STDIN_FILENO, resumed)) {
      if (::isatty(STDIN_FILENO) != 0) print_error("\n");  // ends the line that was being typed
      throw Interrupted("interrupted");
    }
    const ssize_t count = ::read(STDIN_FILENO, bytes, size);
    if (count >= 0) return static_cast<std::size_t>(count);
    if (errno == EIO) return 0;  // the terminal has closed
    if (errno == EINTR || errno == EAGAIN) continue;
    throw Error(ErrorCode::io,
                std::string("standard input: reading failed (") + std::strerror(errno) + ")");
  }
}

// Line editing works on characters, so it needs an encoding; models take UTF-8.
void use_utf8() {
  const bool is_set = std::setlocale(LC_CTYPE, "") != nullptr;
  if (!is_set || std::strcmp(::nl_langinfo(CODESET), "UTF-8") != 0) {
    std::setlocale(LC_CTYPE, "C.UTF-8");
  }
}

void take_line_end(std::string& line) {
  if (line.ends_with('\n')) line.pop_back();
  if (line.ends_with('\r')) line.pop_back();
}

}  // namespace

class LineReader::Edited {
 public:
  explicit Edited(std::string prompt) : prompt_(std::move(prompt)) {
    use_utf8();
    lines_ = ::el_init("sluice", stdin, stdout, stderr);
    history_ = ::history_init();
    if (lines_ == nullptr || history_ == nullptr) {
      free();
      throw Error(ErrorCode::io, "the terminal cannot be used to edit lines; pipe them in instead");
    }
    ::history(history_, &event_, H_SETSIZE, kHistory);
    ::history(history_, &event_, H_SETUNIQUE, 1);
    ::el_set(lines_, EL_CLIENTDATA, this);
    ::el_set(lines_, EL_PROMPT_ESC, &Edited::prompt_of, kEscape);
    ::el_set(lines_, EL_EDITOR, "emacs");
    ::el_set(lines_, EL_HIST, ::history, history_);
    ::el_set(lines_, EL_GETCFN, &Edited::read_character);
    ::el_set(lines_, EL_BIND, "^R", "em-inc-search-prev", nullptr);
  }
  Edited(const Edited&) = delete;
  Edited& operator=(const Edited&) = delete;
  ~Edited() { free(); }

  std::optional<std::string> next() {
    int count = 0;
    failure_ = nullptr;
    ::el_resize(lines_);  // the terminal may have been resized
    const char* const text = ::el_gets(lines_, &count);
    if (failure_ != nullptr) std::rethrow_exception(failure_);
    if (text == nullptr || count <= 0) return std::nullopt;
    std::string line(text, static_cast<std::size_t>(count));
    take_line_end(line);
    if (!line.empty()) ::history(history_, &event_, H_ENTER, line.c_str());
    return line;
  }

 private:
  static Edited& of(EditLine* lines) {
    void* self = nullptr;
    ::el_get(lines, EL_CLIENTDATA, &self);
    return *static_cast<Edited*>(self);
  }

  static char* prompt_of(EditLine* lines) { return of(lines).prompt_.data(); }

  // Called by C code, so it must not throw. 1: a character; 0: the end; -1: failed.
  static int read_character(EditLine* lines, wchar_t* character) {
    // Another process may have changed the terminal's settings, which libedit does not notice.
    const auto draw_again = [lines] {
      ::el_set(lines, EL_PREP_TERM, 0);
      ::el_set(lines, EL_PREP_TERM, 1);
      ::el_set(lines, EL_REFRESH);
    };
    try {
      std::mbstate_t state{};
      char byte = 0;
      while (read_some(&byte, 1, draw_again) == 1) {
        const std::size_t length = std::mbrtowc(character, &byte, 1, &state);
        if (length == static_cast<std::size_t>(-2)) continue;  // incomplete character
        if (length != static_cast<std::size_t>(-1)) return 1;
        state = {};
      }
      return 0;
    } catch (...) {
      of(lines).failure_ = std::current_exception();
      return -1;
    }
  }

  void free() {
    if (lines_ != nullptr) ::el_end(lines_);
    if (history_ != nullptr) ::history_end(history_);
  }

  std::string prompt_;
  EditLine* lines_ = nullptr;
  History* history_ = nullptr;
  HistEvent event_{};
  std::exception_ptr failure_;  // from read_character
};

LineReader::LineReader(const std::optional<std::string>& prompt) {
  if (prompt) edited_ = std::make_unique<Edited>(*prompt);
}
LineReader::~LineReader() = default;

std::optional<std::string> LineReader::next() {
  return edited_ ? edited_->next() : next_as_it_comes();
}

std::optional<std::string> LineReader::next_as_it_comes() {
  std::array<char, 65536> piece{};
  std::size_t end = pending_.find('\n', searched_);
  while (end == std::string::npos) {
    searched_ = pending_.size();
    const std::size_t count = read_some(piece.data(), piece.size());
    if (count == 0 && pending_.empty()) return std::nullopt;
    if (count == 0) break;
    pending_.append(piece.data(), count);
    if (pending_.size() > kMaxLine) {
      throw Error(ErrorCode::prompt, "standard input: a line is longer than 1 GiB; shorten it");
    }
    end = pending_.find('\n', searched_);
  }
  std::string line = pending_.substr(0, end);
  pending_.erase(0, end == std::string::npos ? end : end + 1);
  searched_ = 0;
  take_line_end(line);
  return line;
}

}  // namespace sluice::tools
