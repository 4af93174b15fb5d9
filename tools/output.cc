#include "tools/output.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "io/file_draft.h"
#include "io/json.h"
#include "io/report_file.h"
#include "lib/check.h"
#include "sluice/errors.h"

namespace sluice::tools {
namespace {

constexpr std::size_t kColumns = 80;
constexpr std::string_view kFieldLetters = "abcdefghijklmnopqrstuvwxyz_";
constexpr int kBarCells = 30;
constexpr auto kRedraw = std::chrono::milliseconds(100);

[[noreturn]] void throw_write_error(const std::string& name) {
  throw Error(ErrorCode::io, name + ": cannot be written (" + std::strerror(errno) +
                                 "); make room or choose another file");
}

// True only for regular files, because a terminal may be both read and written.
bool is_same_file(const std::filesystem::path& a, const std::filesystem::path& b) {
  std::error_code ignored;  // a missing file is a different file
  return std::filesystem::is_regular_file(a, ignored) && std::filesystem::equivalent(a, b, ignored);
}

// The canonical path that a file has, or would have once created.
std::filesystem::path place_of(const std::filesystem::path& file) {
  std::error_code none;
  const std::filesystem::path place =
      std::filesystem::weakly_canonical(std::filesystem::absolute(file, none), none);
  return none ? file : place;
}

// Files are matched by name because reports may lie beside a checkpoint.
bool is_of_checkpoint(const std::filesystem::path& file) {
  static constexpr std::array kNames = {"config.json",
                                        "generation_config.json",
                                        "model.safetensors.index.json",
                                        "tokenizer.json",
                                        "tokenizer_config.json",
                                        "special_tokens_map.json",
                                        "chat_template.jinja",
                                        "chat_template.json",
                                        "added_tokens.json",
                                        "vocab.json",
                                        "merges.txt",
                                        "tokenizer.model",
                                        "sluice.json"};
  const std::string name = file.filename().string();
  return file.extension() == ".safetensors" || file.extension() == ".gguf" ||
         name.ends_with(".sluice.json") ||
         std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

bool is_in_checkpoint(const std::filesystem::path& file, const std::filesystem::path& given) {
  std::error_code ignored;  // opening the checkpoint reports a bad folder
  const bool is_file = std::filesystem::is_regular_file(given, ignored);
  if (is_file && is_same_file(file, given)) return true;
  const std::filesystem::path model =
      is_file ? std::filesystem::absolute(given).parent_path() : given;
  // Matches by name even if the file does not exist, because it would become part of the
  // checkpoint.
  const std::filesystem::path folder = place_of(file).parent_path();
  const std::filesystem::path own = std::filesystem::absolute(file).parent_path();
  if (is_of_checkpoint(file) && (folder == place_of(model) || place_of(own) == place_of(model))) {
    return true;
  }
  const std::filesystem::directory_iterator files(model, ignored);
  return std::any_of(begin(files), end(files), [&](const auto& entry) {
    return is_of_checkpoint(entry.path()) && is_same_file(file, entry.path());
  });
}

void require_permission(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) {
    errno = EISDIR;
    if (S_ISDIR(status.st_mode) || ::access(path.c_str(), W_OK) != 0) throw_write_error(path);
    return;
  }
  // Tests if a missing file can be created. A dangling link blocks this and stays as it is.
  const int descriptor =
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  if (descriptor < 0 && errno == EEXIST) return;
  if (descriptor < 0) throw_write_error(path);
  ::close(descriptor);
  ::unlink(path.c_str());
}

// Returns true if a new file can replace `path` without anyone noticing. Not for devices, pipes,
// dangling links, files with other hard links or another owner, and the files behind a process's
// streams.
bool is_replaceable(const std::filesystem::path& path) {
  const std::string text = std::filesystem::absolute(path).string();
  if (text.starts_with("/dev/") || text.starts_with("/proc/")) return false;
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return true;  // nothing to replace
  if (::stat(path.c_str(), &status) != 0) return false;
  return S_ISREG(status.st_mode) && status.st_nlink == 1 && status.st_uid == ::geteuid();
}

// A draft beside `path`; null if no other file can be created there.
std::unique_ptr<FileDraft> draft_of(const std::filesystem::path& path) {
  if (!is_replaceable(path)) return nullptr;
  std::error_code none;
  const std::filesystem::path file = std::filesystem::canonical(path, none);
  try {
    return std::make_unique<FileDraft>(none ? path : file);
  } catch (const Error&) {
    return nullptr;
  }
}

// The standard output or error that goes to the file at `path`, because writing that file from the
// beginning would destroy their output; null if neither does.
std::FILE* stream_into(const std::filesystem::path& path) {
  struct stat file {};
  if (::stat(path.c_str(), &file) != 0 || !S_ISREG(file.st_mode)) return nullptr;
  for (std::FILE* const stream : {stdout, stderr}) {
    struct stat of {};
    const bool is_one =
        ::fstat(::fileno(stream), &of) == 0 && of.st_dev == file.st_dev && of.st_ino == file.st_ino;
    if (is_one) return stream;
  }
  return nullptr;
}

void write_to(std::FILE* stream, const std::string& name,
              const std::function<void(const TextSink&)>& write) {
  bool written = true;
  write([&](std::string_view text) {
    written = written && std::fwrite(text.data(), 1, text.size(), stream) == text.size();
  });
  if (!written || std::fflush(stream) != 0) throw_write_error(name);
}

// Writes a report that starts with the mark by which it may be replaced later.
void write_marked(const std::function<void(const TextSink&)>& write, const TextSink& to) {
  bool begun = false;
  write([&](std::string_view text) {
    if (!begun && !text.empty()) {
      check(text.front() == '{', "a report that is no object");
      to(report_beginning());
      text.remove_prefix(1);
      begun = true;
    }
    to(text);
  });
}

// Writes in place; a failed write loses the old content.
void overwrite(const std::string& path, const std::function<void(const TextSink&)>& write) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "w"), &std::fclose);
  if (!file) throw_write_error(path);
  write_to(file.get(), path, write);
  if (std::fclose(file.release()) != 0) throw_write_error(path);  // may find the disk full
}

}  // namespace

void print(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw_write_error("standard output");
  }
}

void print_error(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

bool is_one_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  if (a.empty() || b.empty() || std::filesystem::is_character_file(a, ignored)) return false;
  return is_same_file(a, b) || place_of(a) == place_of(b);
}

void require_writable(const std::string& path, const std::string& model, const std::string& text,
                      bool force) {
  if (path.empty() || path == "-") return;
  if (is_same_file(path, text) || is_in_checkpoint(path, model)) {
    throw Error(
        ErrorCode::usage,
        path +
            ": is a file of the checkpoint or one that this very command reads, and writing "
            "would overwrite it; choose another file");
  }
  if (!force && stream_into(path) == nullptr) require_may_become_report(path);
  require_permission(path);
}

void write_report(const std::string& path, bool force, const std::string& text) {
  write_report(path, force, [&](const TextSink& to) { to(text); });
}

void write_report(const std::string& path, bool force,
                  const std::function<void(const TextSink&)>& write_unmarked) {
  const auto write = [&](const TextSink& to) { write_marked(write_unmarked, to); };
  if (path == "-") return write([](std::string_view text) { print(text); });
  if (std::FILE* const stream = stream_into(path)) return write_to(stream, path, write);
  if (!force)
    require_may_become_report(
        path);  // checks again, because the file may have appeared during the run
  const std::unique_ptr<FileDraft> draft = draft_of(path);
  if (draft) {
    write([&](std::string_view text) { draft->write(text); });
    if (draft->try_put_in_place()) return;
  }
  overwrite(path, write);
}

void print_beside_report(const std::string& path, std::string_view text) {
  path == "-" ? print_error(text) : print(text);
}

std::string with_flags(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t open = text.find('`');
    const std::size_t close = text.find_first_not_of(kFieldLetters, open + 1);
    const bool is_field =
        open < text.size() && close < text.size() && text[close] == '`' && close > open + 1;
    if (!is_field) {
      const std::size_t taken = open < text.size() ? open + 1 : text.size();
      result += text.substr(0, taken);
      text.remove_prefix(taken);
      continue;
    }
    std::string name(text.substr(open + 1, close - open - 1));
    std::replace(name.begin(), name.end(), '_', '-');
    result.append(text.substr(0, open)).append("--" + name);
    text.remove_prefix(close + 1);
  }
  return result;
}

std::string wrapped(std::string first, std::size_t indent, std::string_view text) {
  first.resize(std::max(first.size(), indent), ' ');
  std::size_t column = first.size();
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    const bool begins_line = column <= indent;
    if (!begins_line && column + 1 + word.size() > kColumns) {
      first.append("\n").append(indent, ' ');
      column = indent;
    } else if (!begins_line) {
      first += ' ';
      ++column;
    }
    first += word;
    column += word.size();
  }
  return first + "\n";
}

std::string report_text(const nlohmann::json& report) { return dump_json(report, 2) + "\n"; }

void write_report_text(const nlohmann::json& report, std::span<const LongMember> longer,
                       const TextSink& to) {
  constexpr std::string_view kEnd = "\n}\n";
  const std::string text = report_text(report);
  check(text.ends_with(kEnd), "a report that is no object, or an empty one");
  to(std::string_view(text).substr(0, text.size() - kEnd.size()));
  for (const LongMember& member : longer) {
    to(",\n  \"" + member.name + "\": ");
    member.write(to);
  }
  to(kEnd);
}

ProgressBar::ProgressBar(std::string label)
    : label_(std::move(label)), visible_(::isatty(STDERR_FILENO) != 0) {}

ProgressBar::~ProgressBar() { clear(); }

void ProgressBar::clear() {
  if (drawn_) print_error("\r\x1b[K");
  drawn_ = false;
}

void ProgressBar::update(double share, const std::string& note) {
  const auto now = std::chrono::steady_clock::now();
  if (!visible_ || (drawn_ && share < 1.0 && now - last_ < kRedraw)) return;
  last_ = now;
  drawn_ = true;
  const int done = static_cast<int>(std::clamp(share, 0.0, 1.0) * kBarCells);
  std::string text = "\r\x1b[K" + label_ + " [";
  text.append(static_cast<std::size_t>(done), '#');
  text.append(static_cast<std::size_t>(kBarCells - done), '.');
  print_error(text + "] " + note);
}

}  // namespace sluice::tools
