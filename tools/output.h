// Standard output, standard error and report files of the `sluice` command.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

namespace sluice::tools {

// Writes and flushes; throws Error{io} if the text did not get through, on a full disk say.
void print(std::string_view text);

// Diagnostics. Failure to show them is not an error.
void print_error(std::string_view text);

// Replaces field names of the library's messages by flags: `device_memory` by --device-memory.
std::string with_flags(std::string_view text);

// `first` and after it the words of `text`, in lines of up to 80 columns that all begin at
// column `indent`; ends with a line break.
std::string wrapped(std::string first, std::size_t indent, std::string_view text);

using TextSink = std::function<void(std::string_view)>;

// A report as it is written; paths that are not UTF-8 lose what JSON cannot hold.
std::string report_text(const nlohmann::json& report);

// A member of a report that is too long to be in memory as a whole: `write` writes its value.
struct LongMember {
  std::string name;
  std::function<void(const TextSink&)> write;
};
// A report that is an object of some members, with longer ones behind them.
void write_report_text(const nlohmann::json& report, std::span<const LongMember> longer,
                       const TextSink& to);

// Returns true if both name one file, which need not exist yet; an empty path names none.
bool is_one_file(const std::string& a, const std::string& b);

// Throws before the work whose report is to go to `path`: Error{io} if that cannot be written;
// Error{usage} if it is a file that this program did not write (see io/report_file.h), unless
// `force` is given; and Error{usage} in any case if it is, or would be, a file of the checkpoint in
// `model` or is the one at `text`, by whatever name: the report would overwrite its own
// input. An empty path or "-" can be written.
void require_writable(const std::string& path, const std::string& model, const std::string& text,
                      bool force);

// Writes a whole report, "-" for standard output, behind the mark of a report. The report is
// written to a file beside `path` and renamed where possible, so an existing report survives a
// failed write. Where a standard stream goes to the file at `path`, the report goes to that stream.
// Throws Error{io} that names the file, and Error{usage} as require_writable does.
void write_report(const std::string& path, bool force, const std::string& text);
// The same, piece by piece.
void write_report(const std::string& path, bool force,
                  const std::function<void(const TextSink&)>& write);
// Prints text for people beside a report at `path`: standard output holds only the report if the
// report goes there.
void print_beside_report(const std::string& path, std::string_view text);

// A line on standard error that is redrawn in place; nothing unless that is a terminal.
class ProgressBar {
 public:
  explicit ProgressBar(std::string label);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();  // clears the line

  // `share` done, 0 to 1; `note` stands after the bar.
  void update(double share, const std::string& note);
  // Makes room for other output; the next update draws the line again.
  void clear();

 private:
  std::string label_;
  bool visible_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace sluice::tools
